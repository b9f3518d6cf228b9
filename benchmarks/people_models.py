"""Models as people write them: those of Opacus' and PyTorch's examples and of nanoGPT, rewritten,
and models built by torchvision, transformers and peft with random weights. Nothing is downloaded.

Layers, forwards and sizes are those of the originals; batches, images and vocabularies are smaller
if one core would need more than half a second for the plain gradient. BatchNorm mixes examples, and
is replaced by GroupNorm. Examples are rows, as in a data set: a model with time as its first
dimension transposes them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import relu

from discreet.per_example.objective import Loss, Tree, cross_entropy


class Case(NamedTuple):
    """A model, a batch for it, and its loss with one value an example. Opacus must know if the
    layers have the batch in the second dimension."""

    model: nn.Module
    inputs: Tree
    targets: Tree
    loss: Loss = cross_entropy
    batch_first: bool = True

    def outputs(self, model: Callable[..., Any]) -> Any:
        """The outputs of the model, or of a wrapper, for the batch."""
        if isinstance(self.inputs, dict):
            return model(**self.inputs)
        return model(*self.inputs) if isinstance(self.inputs, tuple) else model(self.inputs)


class Net(nn.Module):
    """A model made of its parts, whose forward is a function of this file."""

    def __init__(self, how: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.how = how
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.how(self, *inputs, **named)


def opacus_mnist(net: Any, x: Tensor) -> Any:
    """Opacus' mnist.py."""
    x = functional.max_pool2d(relu(net.conv1(x)), 2, 1)
    x = functional.max_pool2d(relu(net.conv2(x)), 2, 1)
    return net.fc2(relu(net.fc1(x.view(-1, 32 * 4 * 4))))


def last_character(net: Any, x: Tensor, hidden: Any = None) -> Any:
    """Opacus' char-lstm-classification.py."""
    x, _ = net.rnn(net.embedding(x), hidden)
    return net.out_layer(x[:, -1, :])


def imdb(net: Any, x: Tensor) -> Any:
    """Opacus' imdb.py, which squeezes away the batch too if there is one example."""
    return net.fc2(relu(net.fc1(net.pool(net.emb(x).transpose(1, 2)).squeeze())))


def discriminators(net: Any, real: Tensor, fake: Tensor) -> Any:
    """The discriminator of Opacus' dcgan.py, for a real and a generated image: an example has two
    losses."""
    return tuple(net.main(x).view(-1, 1).squeeze(1) for x in (real, fake))


def pytorch_mnist(net: Any, x: Tensor) -> Any:
    """PyTorch's mnist."""
    x = functional.max_pool2d(relu(net.conv2(relu(net.conv1(x)))), 2)
    x = net.dropout2(relu(net.fc1(torch.flatten(net.dropout1(x), 1))))
    return functional.log_softmax(net.fc2(x), dim=1)


def mnist_rnn(net: Any, x: Tensor) -> Any:
    """PyTorch's mnist_rnn."""
    output, _ = net.rnn(x.reshape(-1, 28, 28))
    output = net.fc1(net.dropout1(net.norm(output[:, -1, :])))
    return functional.log_softmax(net.fc2(net.dropout2(relu(output))), dim=1)


def word_language_model(net: Any, ids: Tensor) -> Any:
    """PyTorch's word_language_model: an LSTM with time as its first dimension."""
    hidden = tuple(
        net.decoder.weight.new_zeros(net.rnn.num_layers, len(ids), net.rnn.hidden_size)
        for _ in range(2)
    )
    output, hidden = net.rnn(net.drop(net.encoder(ids.t())), hidden)
    decoded = net.decoder(net.drop(output)).view(-1, net.tokens)
    return functional.log_softmax(decoded, dim=1).view(-1, len(ids), net.tokens).permute(1, 2, 0)


def vae(net: Any, x: Tensor) -> Any:
    """PyTorch's vae."""
    inner = relu(net.fc1(x.view(-1, 784)))
    mean, log_variance = net.fc21(inner), net.fc22(inner)
    deviation = torch.exp(0.5 * log_variance)
    drawn = mean + torch.randn_like(deviation) * deviation
    return torch.sigmoid(net.fc4(relu(net.fc3(drawn)))), mean, log_variance


def super_resolution(net: Any, x: Tensor) -> Any:
    """PyTorch's super_resolution."""
    return net.pixel_shuffle(
        net.conv4(net.relu(net.conv3(net.relu(net.conv2(net.relu(net.conv1(x)))))))
    )


def siamese(net: Any, first: Tensor, second: Tensor) -> Any:
    """PyTorch's siamese_network: one ResNet for two images."""
    features = [net.resnet(x) for x in (first, second)]
    return torch.sigmoid(net.fc(torch.cat([x.view(x.size()[0], -1) for x in features], 1))).squeeze(
        1
    )


def block(net: Any, x: Tensor) -> Any:
    """nanoGPT's block: causal attention and a perceptron, each with a residual connection."""
    batch, time, width = x.size()
    parts = net.c_attn(net.ln_1(x)).split(width, dim=2)
    query, key, value = (
        part.view(batch, time, net.heads, width // net.heads).transpose(1, 2) for part in parts
    )
    inner = functional.scaled_dot_product_attention(
        query, key, value, dropout_p=0.0, is_causal=True
    )
    x = x + net.c_proj(inner.transpose(1, 2).contiguous().view(batch, time, width))
    return x + net.mlp(net.ln_2(x))


def nano_gpt(net: Any, ids: Tensor, targets: Tensor | None = None) -> Any:
    """nanoGPT's model. It also returns its own loss, the mean over the batch, which is not used
    here."""
    _, time = ids.size()
    assert time <= net.block_size, f"at most {net.block_size} tokens"
    x = net.wte(ids) + net.wpe(torch.arange(0, time, dtype=torch.long, device=ids.device))
    for layer in net.h:
        x = layer(x)
    logits = net.lm_head(net.ln_f(x))
    if targets is None:
        return logits[:, [-1], :], None
    return logits, functional.cross_entropy(
        logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
    )


def two_towers(net: Any, user: Tensor, item: Tensor) -> Any:
    """A recommender: the product of a user's and an item's vector."""
    return (net.user_tower(net.users(user)) * net.item_tower(net.items(item))).sum(-1)


BINARY = partial(functional.binary_cross_entropy, reduction="none")


def _real_and_fake(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return BINARY(outputs[0], targets) + BINARY(outputs[1], 1 - targets)


def _vae_loss(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    drawn, mean, log_variance = outputs
    return BINARY(drawn, targets.view(-1, 784)).sum(1) - 0.5 * (
        1 + log_variance - mean**2 - log_variance.exp()
    ).sum(1)


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean((1, 2, 3))


def _of_tokens(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return cross_entropy(outputs[0].transpose(1, 2), targets)


def of_logits(outputs: Any, targets: Tensor) -> Tensor:
    """The cross entropy for the outputs of a classifier of transformers."""
    return cross_entropy(outputs.logits, targets)


def _negative_log(outputs: Tensor, targets: Tensor) -> Tensor:
    return (
        functional.nll_loss(outputs, targets, reduction="none").reshape(targets.size(0), -1).mean(1)
    )


def _cifar_convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, 1, padding=1), nn.ReLU(), nn.AvgPool2d(2, 2)]
    layers += [nn.Conv2d(64, 128, 3, 1, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1))]
    return nn.Sequential(*layers, nn.Flatten(1, -1), nn.Linear(128, 10))


def _resnet() -> Any:
    return import_module("torchvision.models").resnet18(
        num_classes=10, norm_layer=partial(nn.GroupNorm, 32)
    )


def _vit() -> nn.Module:
    model: Any = import_module("torchvision.models").VisionTransformer(
        32, 4, 4, 4, 128, 256, num_classes=10
    )
    # It starts at zero, so that the other layers would have no gradient.
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model  # type: ignore[no-any-return]


def _text(kind: str, change: Callable[[nn.Module], nn.Module] = lambda model: model) -> Case:
    """A classifier of transformers with two layers of width 128, for 16 texts of 32 to 64 tokens
    with their attention masks."""
    found, sizes = (
        import_module("transformers"),
        {"vocab_size": 5000, "num_labels": 3, "pad_token_id": 0},
    )
    if kind in ("Bert", "Llama"):
        sizes |= {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 512,
        }
        sizes |= {"num_key_value_heads": 1} if kind == "Llama" else {}
    else:
        sizes |= {"n_embd": 128, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    model = getattr(found, f"{kind}ForSequenceClassification")(
        getattr(found, f"{kind}Config")(**sizes)
    )
    mask = (torch.arange(64) < torch.randint(32, 65, (16, 1))).long()
    inputs = {"input_ids": torch.randint(1, 5000, (16, 64)) * mask, "attention_mask": mask}
    return Case(change(model.train()), inputs, torch.randint(3, (16,)), of_logits)


def lora(model: nn.Module) -> nn.Module:
    """peft's LoRA of rank 8 in the attention, as after some training: at the start half of its
    matrices have no gradient."""
    peft, is_gpt2 = import_module("peft"), hasattr(model, "transformer")
    found = ("c_attn", "query", "value", "q_proj", "v_proj")
    modules = sorted({name.split(".")[-1] for name, _ in model.named_modules()}.intersection(found))
    settings = {
        "task_type": "SEQ_CLS",
        "target_modules": modules,
        "fan_in_fan_out": is_gpt2,
        "lora_dropout": 0.1,
    }
    changed: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, **settings))
    for name, value in changed.named_parameters():
        nn.init.normal_(value, std=0.1) if "lora_B" in name else None
    return changed


def _last_layer(model: nn.Module) -> nn.Module:
    last = "classifier" if hasattr(model, "classifier") else "score"
    model.requires_grad_(False).get_submodule(last).requires_grad_()
    return model


def _images(model: nn.Module, *shape: int, loss: Loss = cross_entropy) -> Case:
    return Case(model, torch.randn(shape), torch.randint(10, shape[:1]), loss)


def _opacus_mnist() -> Case:
    convolutions = {"conv1": nn.Conv2d(1, 16, 8, 2, padding=3), "conv2": nn.Conv2d(16, 32, 4, 2)}
    return _images(
        Net(opacus_mnist, **convolutions, fc1=nn.Linear(512, 32), fc2=nn.Linear(32, 10)),
        64,
        1,
        28,
        28,
    )


def _chars(recurrent: Callable[..., nn.Module]) -> Case:
    rnn = recurrent(64, 128, num_layers=1, bidirectional=False, batch_first=True)
    net = Net(
        last_character, embedding=nn.Embedding(257, 64), rnn=rnn, out_layer=nn.Linear(128, 18)
    )
    return Case(net, torch.randint(257, (128, 16)), torch.randint(18, (128,)))


def _imdb() -> Case:
    layers = {"pool": nn.AdaptiveAvgPool1d(1), "fc1": nn.Linear(16, 16), "fc2": nn.Linear(16, 2)}
    net = Net(imdb, emb=nn.Embedding(28_996, 16), **layers)
    return Case(net, torch.randint(28_996, (64, 256)), torch.randint(2, (64,)))


def _dcgan() -> Case:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
    ]
    for before in (64, 128, 256):
        convolution, norm = (
            nn.Conv2d(before, 2 * before, 4, 2, 1, bias=False),
            nn.GroupNorm(32, 2 * before),
        )
        layers += [convolution, norm, nn.LeakyReLU(0.2, inplace=True)]
    main = nn.Sequential(*layers, nn.Conv2d(512, 1, 4, 1, 0, bias=False), nn.Sigmoid())
    images = tuple(2 * torch.rand(2, 16, 3, 64, 64) - 1)
    return Case(Net(discriminators, main=main), images, torch.ones(16), _real_and_fake)


def _pytorch_mnist() -> Case:
    convolutions = {
        "conv1": nn.Conv2d(1, 32, 3, 1),
        "conv2": nn.Conv2d(32, 64, 3, 1),
        "dropout1": nn.Dropout(0.25),
    }
    linear = {"dropout2": nn.Dropout(0.5), "fc1": nn.Linear(9216, 128), "fc2": nn.Linear(128, 10)}
    return _images(Net(pytorch_mnist, **convolutions, **linear), 64, 1, 28, 28, loss=_negative_log)


def _mnist_rnn() -> Case:
    first = {
        "rnn": nn.LSTM(28, 64, batch_first=True),
        "norm": nn.GroupNorm(1, 64),
        "dropout1": nn.Dropout2d(0.25),
    }
    linear = {"dropout2": nn.Dropout2d(0.5), "fc1": nn.Linear(64, 32), "fc2": nn.Linear(32, 10)}
    return _images(Net(mnist_rnn, **first, **linear), 64, 1, 28, 28, loss=_negative_log)


def _words(tokens: int = 10_000, width: int = 200) -> Case:
    ids, drop, rnn = (
        torch.randint(tokens, (20, 36)),
        nn.Dropout(0.2),
        nn.LSTM(width, width, 2, dropout=0.2),
    )
    encoder, decoder = nn.Embedding(tokens, width), nn.Linear(width, tokens)
    net = Net(
        word_language_model, tokens=tokens, drop=drop, encoder=encoder, rnn=rnn, decoder=decoder
    )
    return Case(net, ids[:, :-1].clone(), ids[:, 1:].clone(), _negative_log, False)


def _vae() -> Case:
    sizes = {
        "fc1": (784, 400),
        "fc21": (400, 20),
        "fc22": (400, 20),
        "fc3": (20, 400),
        "fc4": (400, 784),
    }
    images = torch.rand(128, 1, 28, 28)
    return Case(
        Net(vae, **{name: nn.Linear(*size) for name, size in sizes.items()}),
        images,
        images,
        _vae_loss,
    )


def _super_resolution() -> Case:
    sizes = {"conv2": (64, 64), "conv3": (64, 32), "conv4": (32, 9)}
    layers = {name: nn.Conv2d(*size, 3, 1, 1) for name, size in sizes.items()}
    others = {
        "conv1": nn.Conv2d(1, 64, 5, 1, 2),
        "relu": nn.ReLU(),
        "pixel_shuffle": nn.PixelShuffle(3),
    }
    net = Net(super_resolution, **others, **layers)
    return Case(net, torch.rand(16, 1, 32, 32), torch.rand(16, 1, 96, 96), _squared)


def _siamese() -> Case:
    resnet = nn.Sequential(nn.Conv2d(1, 64, 7, 2, 3, bias=False), *list(_resnet().children())[1:-1])
    linear = nn.Sequential(nn.Linear(2 * 512, 256), nn.ReLU(inplace=True), nn.Linear(256, 1))
    images = tuple(torch.rand(2, 32, 1, 28, 28))
    return Case(
        Net(siamese, resnet=resnet, fc=linear), images, torch.randint(2, (32,)).float(), BINARY
    )


def _block(width: int) -> nn.Module:
    def linear(before: int, after: int) -> nn.Module:
        return nn.Linear(before * width, after * width, bias=False)

    norms = {"ln_1": nn.LayerNorm(width, bias=False), "ln_2": nn.LayerNorm(width, bias=False)}
    mlp = nn.Sequential(linear(1, 4), nn.GELU(), linear(4, 1), nn.Dropout(0.0))
    return Net(block, heads=4, c_attn=linear(1, 3), c_proj=linear(1, 1), mlp=mlp, **norms)


def _nano_gpt(tokens: int = 65, width: int = 128) -> Case:
    """As trained on a CPU in its README: characters, 4 layers, tied embeddings."""
    embeddings = {"wte": nn.Embedding(tokens, width), "wpe": nn.Embedding(64, width)}
    last = {
        "ln_f": nn.LayerNorm(width, bias=False),
        "lm_head": nn.Linear(width, tokens, bias=False),
    }
    net: Any = Net(
        nano_gpt,
        block_size=64,
        **embeddings,
        h=nn.ModuleList(_block(width) for _ in range(4)),
        **last,
    )
    net.wte.weight = net.lm_head.weight
    for value in net.parameters():
        nn.init.normal_(value, std=0.02) if value.dim() > 1 else None
    ids = torch.randint(tokens, (12, 65))
    batch = ids[:, :-1].clone(), ids[:, 1:].clone()
    return Case(net, batch, batch[1], _of_tokens)


def _two_towers() -> Case:
    towers = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2))
    # the numbers of MovieLens 1M
    parts = {
        "users": nn.Embedding(6040, 64),
        "items": nn.Embedding(3706, 64),
    }
    net = Net(two_towers, user_tower=next(towers), item_tower=next(towers), **parts)
    inputs = {"user": torch.randint(6040, (512,)), "item": torch.randint(3706, (512,))}
    clicked = partial(functional.binary_cross_entropy_with_logits, reduction="none")
    return Case(net, inputs, torch.randint(2, (512,)).float(), clicked)


CASES: dict[str, Callable[[], Case]] = {
    "Opacus mnist": _opacus_mnist,
    "Opacus cifar10": lambda: _images(_cifar_convnet(), 64, 3, 32, 32),
    "Opacus cifar10, ResNet-18": lambda: _images(_resnet(), 32, 3, 32, 32),
    "Opacus char-lstm, nn.LSTM": lambda: _chars(nn.LSTM),
    "Opacus char-lstm, DPLSTM": lambda: _chars(import_module("opacus.layers").DPLSTM),
    "Opacus char-lstm, nn.GRU": lambda: _chars(nn.GRU),
    "Opacus imdb": _imdb,
    "Opacus dcgan": _dcgan,
    "PyTorch mnist": _pytorch_mnist,
    "PyTorch mnist_rnn": _mnist_rnn,
    "PyTorch word_language_model": _words,
    "PyTorch vae": _vae,
    "PyTorch super_resolution": _super_resolution,
    "PyTorch siamese_network": _siamese,
    "torchvision vit": lambda: _images(_vit(), 32, 3, 32, 32),
    "BERT": lambda: _text("Bert"),
    "BERT, LoRA": lambda: _text("Bert", lora),
    "BERT, last layer": lambda: _text("Bert", _last_layer),
    "GPT-2": lambda: _text("GPT2"),
    "GPT-2, LoRA": lambda: _text("GPT2", lora),
    "GPT-2, last layer": lambda: _text("GPT2", _last_layer),
    "Llama, LoRA": lambda: _text("Llama", lora),
    "nanoGPT": _nano_gpt,
    "two towers": _two_towers,
}
