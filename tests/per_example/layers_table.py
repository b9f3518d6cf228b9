"""The table of docs/guide/models.md: every class of torch.nn is built, tried, and held to a loop of
single examples.

`python -m tests.per_example.layers_table` writes it.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from discreet.layers.draws import drawn_from, own_draws
from discreet.per_example.criteria import per_example_loss
from discreet.per_example.objective import Loss, cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum, l1_clipped_gradient_sum
from tests.per_example.key_masks import CPU, KEY, Masked
from tests.per_example.layers_cases import GROUPS, LOSSES, Case, Run
from tests.per_example.test_per_example_oracle import clipped_sum

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "guide" / "models.md"
MARK = "<!-- the table: made by `python -m tests.per_example.layers_table` -->\n"
COUNT, CLIP = 5, 0.3


class Called(nn.Module):
    """A layer that a forward of one's own calls."""

    def __init__(self, layer: nn.Module, run: Run) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(self.layer, inputs)


def model_of(case: Case) -> nn.Module:
    """The layer between a linear layer and a head, which both have gradients that go through it or
    by it."""
    layer = case.layer() if case.run is None else Called(case.layer(), case.run)
    before = [] if case.ids else [nn.Linear(case.shape[-1], case.shape[-1])]
    with torch.random.fork_rng(), torch.no_grad():
        model = nn.Sequential(*before, layer).train(case.training)
        size = model(inputs_of(case)).flatten(1).shape[1]
    return nn.Sequential(model, nn.Flatten(), nn.Linear(size, 3)).train(case.training)


def inputs_of(case: Case) -> Tensor:
    draws = torch.Generator().manual_seed(2741)
    shape = (COUNT, *case.shape)
    return (
        torch.randint(0, 6, shape, generator=draws)
        if case.ids
        else torch.randn(shape, generator=draws)
    )


def gradients_of(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """(n, num_params) by plain autograd: example by example, or for layers with chance each loss of
    one pass."""
    parameters = list(model.parameters())
    state = torch.get_rng_state()
    with drawn_from(KEY), own_draws(len(inputs), CPU) as draws, Masked(draws):
        losses = list(loss(model(inputs), targets))
    if not draws.calls and torch.equal(state, torch.get_rng_state()):
        losses = [
            loss(model(one), target)
            for one, target in zip(inputs.split(1), targets.split(1), strict=True)
        ]  # type: ignore[no-untyped-call]
    rows = [
        torch.autograd.grad(each.sum(), parameters, retain_graph=True, materialize_grads=True)
        for each in losses
    ]
    return torch.stack([torch.cat([value.to_dense().flatten() for value in row]) for row in rows])


@contextmanager
def messages() -> Iterator[list[str]]:
    """What the log "discreet" says meanwhile."""
    found: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("discreet")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def tried(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss = cross_entropy) -> str:
    """How the model is served, after its clipped sums were found to be those of single examples; or
    why it is not."""
    with messages() as said:
        for order, clipped in ((2, clipped_gradient_sum), (1, l1_clipped_gradient_sum)):
            options: dict[str, Any] = {"clip_norm": CLIP, "loss": loss}
            try:
                with drawn_from(KEY):
                    total, norms = clipped(model, inputs, targets=targets, **options)
            except ValueError as error:
                return f"refused: {error}"
            wanted, wanted_norms = clipped_sum(
                gradients_of(model, inputs, targets, loss), CLIP, order=order
            )
            torch.testing.assert_close(norms.double(), wanted_norms, rtol=1e-3, atol=1e-6)
            assert float((total.double() - wanted).norm()) <= 1e-3 * CLIP * math.sqrt(COUNT)
    return "sequential" if said else "side by side"


def how(case: Case) -> str:
    targets = torch.randint(0, 3, (COUNT,), generator=torch.Generator().manual_seed(97))
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch on lazy layers and on padding
        torch.manual_seed(1009)
        lazy = isinstance(case.layer(), nn.modules.lazy.LazyModuleMixin)
        model = nn.Sequential(case.layer()) if lazy else model_of(case)
        return tried(model, inputs_of(case), targets)


def how_loss(criterion: nn.Module) -> str:
    try:
        per_example_loss(criterion)
    except ValueError as error:
        return f"refused: {error}"
    return "with `per_example_loss`"


def rows_of(group: str) -> list[tuple[str, str, str]]:
    """(layers, setting, how): a row for all layers of a group that are served alike, unless side by
    side."""
    found = defaultdict[tuple[str, str], list[str]](list)
    for case in GROUPS[group]:
        found[case.setting, how(case).partition(":")[0]].append(type(case.layer()).__name__)
    return [(", ".join(names), *what) for what, names in found.items() if what[1] != "side by side"]


def section(group: str) -> str:
    return "".join(
        f"| {names} | {setting} | {verdict} |\n" for names, setting, verdict in rows_of(group)
    )


def losses() -> str:
    refused = ", ".join(
        type(each).__name__ for each in LOSSES if how_loss(each).startswith("refused")
    )
    return (
        "These losses are refused by `per_example_loss`, which takes all others of "
        f"`torch.nn`:\n{refused}.\n"
    )


def table() -> str:
    head = "| layers | setting | how |\n|---|---|---|\n"
    return f"{head}{''.join(section(group) for group in GROUPS)}\n{losses()}"


def main() -> None:
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(MARK) + len(MARK)] + "\n" + table())


if __name__ == "__main__":
    main()
