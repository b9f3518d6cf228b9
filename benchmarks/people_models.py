"""Models as people write them: those of Opacus' and PyTorch's examples and of nanoGPT, written anew, and models built
by torchvision, transformers and peft from random weights. Nothing is downloaded.

Layers, forwards and sizes are the originals'; batches, images and vocabularies are smaller if one core needs more than
half a second for the plain gradient. BatchNorm mixes examples, and is GroupNorm here. Examples are rows, as a data set
gives them: a model whose time comes first transposes them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.per_example.objective import Loss, Tree, cross_entropy


class Case(NamedTuple):
    """A model, a batch for it, and its loss: one value an example. Opacus has to be told if its layers see the batch
    in the second dimension."""

    model: nn.Module
    inputs: Tree
    targets: Tree
    loss: Loss = cross_entropy
    batch_first: bool = True

    def outputs(self, model: Callable[..., Any]) -> Any:
        """What a model, or what stands around it, gives for the batch."""
        if isinstance(self.inputs, dict):
            return model(**self.inputs)
        return model(*self.inputs) if isinstance(self.inputs, tuple) else model(self.inputs)


class OpacusMnist(nn.Module):
    """Opacus' mnist.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 8, 2, padding=3), nn.Conv2d(16, 32, 4, 2)
        self.fc1, self.fc2 = nn.Linear(32 * 4 * 4, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Any:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2, 1)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2, 1)
        return self.fc2(functional.relu(self.fc1(x.view(-1, 32 * 4 * 4))))


class CharClassifier(nn.Module):
    """Opacus' char-lstm-classification.py, with any recurrent layer."""

    def __init__(self, recurrent: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding, self.out_layer = nn.Embedding(257, 64), nn.Linear(128, 18)
        self.rnn = recurrent(64, 128, num_layers=1, bidirectional=False, batch_first=True)

    def forward(self, x: Tensor, hidden: Any = None) -> Any:
        x, _ = self.rnn(self.embedding(x), hidden)
        return self.out_layer(x[:, -1, :])


class Imdb(nn.Module):
    """Opacus' imdb.py, which squeezes away the batch too if there is one example."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.emb, self.pool = nn.Embedding(tokens, 16), nn.AdaptiveAvgPool1d(1)
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.pool(self.emb(x).transpose(1, 2)).squeeze()
        return self.fc2(functional.relu(self.fc1(x)))


class Discriminator(nn.Module):
    """The discriminator of Opacus' dcgan.py, for a real and a generated image: an example has two losses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        for before in (width, 2 * width, 4 * width):
            norm = nn.GroupNorm(min(32, 2 * before), 2 * before)
            layers += [nn.Conv2d(before, 2 * before, 4, 2, 1, bias=False), norm, nn.LeakyReLU(0.2, inplace=True)]
        self.main = nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Sigmoid())

    def forward(self, real: Tensor, fake: Tensor) -> Any:
        return tuple(self.main(x).view(-1, 1).squeeze(1) for x in (real, fake))


class PytorchMnist(nn.Module):
    """PyTorch's mnist."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Any:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(functional.max_pool2d(x, 2)), 1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


class MnistRnn(nn.Module):
    """PyTorch's mnist_rnn, with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.norm = nn.LSTM(input_size=28, hidden_size=64, batch_first=True), nn.GroupNorm(1, 64)
        self.dropout1, self.dropout2 = nn.Dropout2d(0.25), nn.Dropout2d(0.5)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Any:
        output, _ = self.rnn(x.reshape(-1, 28, 28))
        output = self.fc1(self.dropout1(self.norm(output[:, -1, :])))
        return functional.log_softmax(self.fc2(self.dropout2(functional.relu(output))), dim=1)


class WordLanguageModel(nn.Module):
    """PyTorch's word_language_model: an LSTM whose time comes first."""

    def __init__(self, tokens: int, width: int = 200, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.tokens, self.width, self.layers, self.drop = tokens, width, layers, nn.Dropout(dropout)
        self.encoder, self.rnn = nn.Embedding(tokens, width), nn.LSTM(width, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, tokens)

    def forward(self, ids: Tensor) -> Any:
        hidden = tuple(next(self.parameters()).new_zeros(self.layers, len(ids), self.width) for _ in range(2))
        output, hidden = self.rnn(self.drop(self.encoder(ids.t())), hidden)
        decoded = functional.log_softmax(self.decoder(self.drop(output)).view(-1, self.tokens), dim=1)
        return decoded.view(-1, len(ids), self.tokens).permute(1, 2, 0)


class Vae(nn.Module):
    """PyTorch's vae."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x: Tensor) -> Any:
        inner = functional.relu(self.fc1(x.view(-1, 784)))
        mean, log_variance = self.fc21(inner), self.fc22(inner)
        deviation = torch.exp(0.5 * log_variance)
        drawn = mean + torch.randn_like(deviation) * deviation
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(drawn)))), mean, log_variance


class SuperResolution(nn.Module):
    """PyTorch's super_resolution."""

    def __init__(self, factor: int = 3) -> None:
        super().__init__()
        self.relu, self.pixel_shuffle = nn.ReLU(), nn.PixelShuffle(factor)
        self.conv1, self.conv2 = nn.Conv2d(1, 64, 5, 1, 2), nn.Conv2d(64, 64, 3, 1, 1)
        self.conv3, self.conv4 = nn.Conv2d(64, 32, 3, 1, 1), nn.Conv2d(32, factor**2, 3, 1, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.pixel_shuffle(self.conv4(self.relu(self.conv3(x))))


class Siamese(nn.Module):
    """PyTorch's siamese_network: one ResNet for two images."""

    def __init__(self) -> None:
        super().__init__()
        resnet = _resnet()
        resnet.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
        self.resnet = nn.Sequential(*list(resnet.children())[:-1])
        self.fc = nn.Sequential(nn.Linear(2 * 512, 256), nn.ReLU(inplace=True), nn.Linear(256, 1))

    def forward(self, first: Tensor, second: Tensor) -> Any:
        features = [self.resnet(x) for x in (first, second)]
        joined = torch.cat([x.view(x.size()[0], -1) for x in features], 1)
        return torch.sigmoid(self.fc(joined)).squeeze(1)


class Attention(nn.Module):
    """nanoGPT's block: causal attention and a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        wide, narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.heads, self.mlp = heads, nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.size()
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        query, key, value = (part.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        inner = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.0, is_causal=True)
        x = x + self.c_proj(inner.transpose(1, 2).contiguous().view(batch, time, width))
        mixed: Tensor = x + self.mlp(self.ln_2(x))
        return mixed


class NanoGpt(nn.Module):
    """nanoGPT's model, as its README trains it on one core: characters, 4 layers of 128, tied embeddings. It also
    gives a loss of its own, the mean over the batch, which nobody uses here."""

    def __init__(self, tokens: int = 65, block: int = 64, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.block, self.wte, self.wpe = block, nn.Embedding(tokens, width), nn.Embedding(block, width)
        self.h, self.ln_f = nn.ModuleList(Attention(width, 4) for _ in range(layers)), nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, tokens, bias=False)
        self.wte.weight = self.lm_head.weight
        for value in self.parameters():
            nn.init.normal_(value, std=0.02) if value.dim() > 1 else None

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        _, time = ids.size()
        assert time <= self.block, f"at most {self.block} tokens"
        x = self.wte(ids) + self.wpe(torch.arange(0, time, dtype=torch.long, device=ids.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class TwoTowers(nn.Module):
    """A recommender: the product of a user's and an item's vector, for as many as MovieLens 1M has."""

    def __init__(self, users: int = 6040, items: int = 3706, width: int = 64) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_tower, self.item_tower = (
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 32)) for _ in range(2)
        )

    def forward(self, user: Tensor, item: Tensor) -> Any:
        return (self.user_tower(self.users(user)) * self.item_tower(self.items(item))).sum(-1)


def _binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy(outputs, targets, reduction="none")


def _negative_log(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.nll_loss(outputs, targets, reduction="none").reshape(len(targets), -1).mean(1)


def _real_and_fake(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    real, fake = outputs
    return _binary(real, targets) + _binary(fake, 1 - targets)


def _vae_loss(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    drawn, mean, log_variance = outputs
    return _binary(drawn, targets.view(-1, 784)).sum(1) - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean((1, 2, 3))


def _clicked(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


def _of_logits(outputs: Any, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.logits, targets)


def _next_token(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return cross_entropy(outputs[0].transpose(1, 2), targets)


def _classes(*shape: int, of: int) -> Tensor:
    return torch.randint(of, shape)


def _cifar_convnet() -> nn.Module:
    """Opacus' cifar10.py."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, 1, padding=1), nn.ReLU(), nn.AvgPool2d(2, 2)]
    layers += [nn.Conv2d(64, 128, 3, 1, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1))]
    return nn.Sequential(*layers, nn.Flatten(1, -1), nn.Linear(128, 10))


def _resnet() -> Any:
    """torchvision's ResNet-18 with GroupNorm, as Opacus' tutorial on CIFAR-10 has it."""
    normed = partial(import_module("torchvision.models").resnet18, norm_layer=partial(nn.GroupNorm, 32))
    return normed(num_classes=10)


def _vit() -> Any:
    """torchvision's vision transformer; its head begins at zero, and would leave the rest without a gradient."""
    model = import_module("torchvision.models").VisionTransformer(32, 4, 4, 4, 128, 256, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


def _text(kind: str, change: Callable[[nn.Module], nn.Module] = lambda model: model) -> Case:
    """A classifier of transformers, two layers of 128, for 16 texts of 32 to 64 tokens with their attention masks."""
    found, few = import_module("transformers"), {"vocab_size": 5000, "num_labels": 3, "pad_token_id": 0}
    if kind == "Bert":
        sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    else:
        sizes = {"n_embd": 128, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    model = getattr(found, f"{kind}ForSequenceClassification")(getattr(found, f"{kind}Config")(**few, **sizes))
    mask = (torch.arange(64) < torch.randint(32, 65, (16, 1))).long()
    inputs = {"input_ids": torch.randint(1, 5000, (16, 64)) * mask, "attention_mask": mask}
    return Case(change(model), inputs, _classes(16, of=3), _of_logits)


def _lora(model: nn.Module) -> nn.Module:
    """peft's LoRA of rank 8 in the attention, after some training: at the start half of it has no gradient."""
    peft = import_module("peft")
    targets, is_gpt2 = (["c_attn"], True) if hasattr(model, "transformer") else (["query", "value"], False)
    settings = {"task_type": "SEQ_CLS", "target_modules": targets, "fan_in_fan_out": is_gpt2, "lora_dropout": 0.1}
    changed: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, **settings))
    for name, value in changed.named_parameters():
        nn.init.normal_(value, std=0.1) if "lora_B" in name else None
    return changed


def _last_layer(model: nn.Module) -> nn.Module:
    for name, value in model.named_parameters():
        value.requires_grad_(name.startswith(("classifier", "score")))
    return model


def _chars(recurrent: Callable[..., nn.Module]) -> Case:
    return Case(CharClassifier(recurrent), _classes(128, 16, of=257), _classes(128, of=18))


def _images(model: nn.Module, shape: tuple[int, ...], loss: Loss = cross_entropy) -> Case:
    return Case(model, torch.randn(shape), _classes(shape[0], of=10), loss)


def _dcgan() -> Case:
    images = torch.rand(2, 16, 3, 64, 64) * 2 - 1
    return Case(Discriminator(64), tuple(images), torch.ones(16), _real_and_fake)


def _vae() -> Case:
    images = torch.rand(128, 1, 28, 28)
    return Case(Vae(), images, images, _vae_loss)


def _words() -> Case:
    ids = _classes(20, 36, of=10_000)
    return Case(WordLanguageModel(10_000), ids[:, :-1].clone(), ids[:, 1:].clone(), _negative_log, False)


def _nano_gpt() -> Case:
    ids = _classes(12, 65, of=65)
    targets = ids[:, 1:].clone()
    return Case(NanoGpt(), (ids[:, :-1].clone(), targets), targets, _next_token)


def _two_towers() -> Case:
    inputs = {"user": _classes(512, of=6040), "item": _classes(512, of=3706)}
    return Case(TwoTowers(), inputs, torch.randint(2, (512,)).float(), _clicked)


CASES: dict[str, Callable[[], Case]] = {
    "Opacus mnist": lambda: _images(OpacusMnist(), (64, 1, 28, 28)),
    "Opacus cifar10": lambda: _images(_cifar_convnet(), (64, 3, 32, 32)),
    "Opacus cifar10, ResNet-18": lambda: _images(_resnet(), (32, 3, 32, 32)),
    "Opacus char-lstm, nn.LSTM": lambda: _chars(nn.LSTM),
    "Opacus char-lstm, DPLSTM": lambda: _chars(import_module("opacus.layers").DPLSTM),
    "Opacus char-lstm, nn.GRU": lambda: _chars(nn.GRU),
    "Opacus imdb": lambda: Case(Imdb(28_996), _classes(64, 256, of=28_996), _classes(64, of=2)),
    "Opacus dcgan": _dcgan,
    "PyTorch mnist": lambda: _images(PytorchMnist(), (64, 1, 28, 28), _negative_log),
    "PyTorch mnist_rnn": lambda: _images(MnistRnn(), (64, 1, 28, 28), _negative_log),
    "PyTorch word_language_model": _words,
    "PyTorch vae": _vae,
    "PyTorch super_resolution": lambda: Case(
        SuperResolution(), torch.rand(16, 1, 32, 32), torch.rand(16, 1, 96, 96), _squared
    ),
    "PyTorch siamese_network": lambda: Case(
        Siamese(), tuple(torch.rand(2, 32, 1, 28, 28)), torch.randint(2, (32,)).float(), _binary
    ),
    "torchvision vit": lambda: _images(_vit(), (32, 3, 32, 32)),
    "BERT": lambda: _text("Bert"),
    "BERT, LoRA": lambda: _text("Bert", _lora),
    "BERT, last layer": lambda: _text("Bert", _last_layer),
    "GPT-2": lambda: _text("GPT2"),
    "GPT-2, LoRA": lambda: _text("GPT2", _lora),
    "GPT-2, last layer": lambda: _text("GPT2", _last_layer),
    "nanoGPT": _nano_gpt,
    "two towers": _two_towers,
}
