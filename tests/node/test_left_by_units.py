"""What one example makes a model or a metric of one's own keep, wherever it keeps it, reaches no
other example: in steps of DP-SGD, in ratings, and where examples can't be computed together."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from discreet.data.examples import Examples
from discreet.node.work import work_of
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.protocol.messages import Assignment, TrainReply
from discreet.training.failing_units import COUNTS_AS_ZERO
from discreet.training.local_training import LocalSettings
from discreet.training.shared_step import SharedClip, shared_step
from tests.node.clients import client, examples, linear, params_of
from tests.node.test_noised_answers import RATE, ask, rating_client
from tests.replay import Replay, replay

SHARED = SimpleNamespace(seen=False)
LARGE = torch.tensor([[1e3, 50.0, -1e3, 3.0, 9.0]])


class Turning(nn.Linear):
    """A large example turns the outputs of all that come later."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.begin()
        with torch.no_grad():
            self.load_state_dict(linear().state_dict(), strict=False)

    def begin(self) -> None:
        pass

    def has_seen(self) -> bool:
        raise NotImplementedError

    def see(self) -> None:
        raise NotImplementedError

    def is_large(self, inputs: Tensor) -> bool:
        return bool((inputs > 40).any())

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if self.is_large(inputs):
            self.see()
        return -outputs if self.has_seen() else outputs


class InAList(Turning):
    def begin(self) -> None:
        self.seen = list[int]()

    def has_seen(self) -> bool:
        return bool(self.seen)

    def see(self) -> None:
        self.seen.append(1)


class InATensor(Turning):
    def begin(self) -> None:
        self.seen = torch.zeros(())

    def has_seen(self) -> bool:
        return bool(self.seen)

    def see(self) -> None:
        self.seen.fill_(1.0)


class InABufferBesideALock(Turning):
    """No deepcopy makes another one of it."""

    def begin(self) -> None:
        self.lock = threading.Lock()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def has_seen(self) -> bool:
        return bool(self.get_buffer("seen"))

    def see(self) -> None:
        self.get_buffer("seen").fill_(1.0)


class InAGlobalNameByNumpy(Turning):
    """No watch can follow it."""

    def has_seen(self) -> bool:
        return SHARED.seen

    def see(self) -> None:
        SHARED.seen = True

    def is_large(self, inputs: Tensor) -> bool:
        return bool((inputs.numpy(force=True) > 40).any())


class InAClosureByNumpy(InAGlobalNameByNumpy):
    def begin(self) -> None:
        seen = list[int]()
        self.note: Callable[[], None] = lambda: seen.append(1)
        self.noted: Callable[[], bool] = lambda: bool(seen)

    def has_seen(self) -> bool:
        return self.noted()

    def see(self) -> None:
        self.note()


class InAGlobalNameBeforeAnError(Turning):
    def has_seen(self) -> bool:
        return SHARED.seen

    def see(self) -> None:
        SHARED.seen = True
        raise RuntimeError("a large example")


class InADerivedList(InAList):
    class Seen(list[int]):
        pass

    def begin(self) -> None:
        self.seen = self.Seen()


class InANewBuffer(Turning):
    def has_seen(self) -> bool:
        return "seen" in self._buffers

    def see(self) -> None:
        self.register_buffer("seen", torch.zeros(()))


class InANewModule(Turning):
    def has_seen(self) -> bool:
        return hasattr(self, "seen")

    def see(self) -> None:
        self.seen = nn.Identity()


class InAGradient(Turning):
    def has_seen(self) -> bool:
        return self.bias.grad is not None

    def see(self) -> None:
        self.bias.grad = torch.zeros(3)


class InATypeOfNumbers(Turning):
    def has_seen(self) -> bool:
        return self.bias.dtype == torch.float16

    def see(self) -> None:
        self.half()


class InAFrozenParameter(Turning):
    def has_seen(self) -> bool:
        return not self.bias.requires_grad

    def see(self) -> None:
        self.requires_grad_(requires_grad=False)


class InAnObjectOfAnObject(Turning):
    def begin(self) -> None:
        self.of = SimpleNamespace(of=SimpleNamespace(seen=False))

    def has_seen(self) -> bool:
        return bool(self.of.of.seen)

    def see(self) -> None:
        self.of.of.seen = True


class OnAClass(Turning):
    seen = False

    def begin(self) -> None:
        OnAClass.seen = False

    def has_seen(self) -> bool:
        return OnAClass.seen

    def see(self) -> None:
        OnAClass.seen = True


class OnALayer(Turning):
    """In an object that is an attribute of a module of PyTorch."""

    def begin(self) -> None:
        self.layer = nn.Identity()
        self.layer.of = SimpleNamespace(seen=False)

    def has_seen(self) -> bool:
        return bool(self.layer.of.seen)  # type: ignore[union-attr]

    def see(self) -> None:
        self.layer.of.seen = True  # type: ignore[union-attr]


class InAnotherClass(Turning):
    def has_seen(self) -> bool:
        return type(self) is Turned

    def see(self) -> None:
        self.__class__ = Turned  # type: ignore[assignment]


class Turned(InAnotherClass):
    pass


class InATeachersGradient(Turning):
    def begin(self) -> None:
        self.teachers = (nn.Linear(1, 1),)

    def has_seen(self) -> bool:
        return self.teachers[0].bias.grad is not None

    def see(self) -> None:
        self.teachers[0].bias.grad = torch.ones(1)


class InAVariableThatIsEmptyAtFirst(Turning):
    def begin(self) -> None:
        def note() -> None:
            nonlocal seen
            seen = True

        def noted() -> bool:
            try:
                return seen
            except NameError:
                return False

        self.see, self.has_seen = note, noted  # type: ignore[method-assign]
        if False:
            seen = True


class InADefaultType(Turning):
    def has_seen(self) -> bool:
        return torch.get_default_dtype() == torch.float64

    def see(self) -> None:
        torch.set_default_dtype(torch.float64)


class InADefaultDevice(Turning):
    def has_seen(self) -> bool:
        return torch.get_default_device().type == "meta"

    def see(self) -> None:
        torch.set_default_device("meta")


class InAutocast(Turning):
    def has_seen(self) -> bool:
        return torch.get_autocast_dtype("cpu") == torch.float16

    def see(self) -> None:
        torch.set_autocast_dtype("cpu", torch.float16)


class InAModeOfFunctions(Turning):
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def has_seen(self) -> bool:
        return any(isinstance(mode, self.Mode) for mode in _get_current_function_mode_stack())

    def see(self) -> None:
        self.Mode().__enter__()


class InAModeOfDispatch(Turning):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def has_seen(self) -> bool:
        return any(isinstance(mode, self.Mode) for mode in _get_current_dispatch_mode_stack())

    def see(self) -> None:
        self.Mode().__enter__()


class InTheNumberOfThreads(Turning):
    def begin(self) -> None:
        self.before = torch.get_num_threads()

    def has_seen(self) -> bool:
        return torch.get_num_threads() != self.before

    def see(self) -> None:
        torch.set_num_threads(self.before + 1)


class InTheRecursionLimit(Turning):
    def begin(self) -> None:
        self.before = sys.getrecursionlimit()

    def has_seen(self) -> bool:
        return sys.getrecursionlimit() != self.before

    def see(self) -> None:
        sys.setrecursionlimit(self.before + 1)


class WithAnExpandedBuffer(Turning):
    """Nothing is left, and one number stands for five."""

    def begin(self) -> None:
        self.register_buffer("scale", torch.ones(1).expand(5), persistent=False)

    def has_seen(self) -> bool:
        return False

    def see(self) -> None:
        pass


KINDS = [
    InAList,
    InADerivedList,
    InANewBuffer,
    InANewModule,
    InAGradient,
    InATypeOfNumbers,
    InAFrozenParameter,
    InAnObjectOfAnObject,
    OnAClass,
    OnALayer,
    InAnotherClass,
    InATeachersGradient,
    InAVariableThatIsEmptyAtFirst,
    InADefaultType,
    InADefaultDevice,
    InAutocast,
    InAModeOfFunctions,
    InAModeOfDispatch,
    InTheNumberOfThreads,
    InTheRecursionLimit,
    WithAnExpandedBuffer,
    InATensor,
    InABufferBesideALock,
    InAGlobalNameByNumpy,
    InAClosureByNumpy,
    InAGlobalNameBeforeAnError,
]


def replayed(kind: type[Turning], work: Assignment, folder: Path, *words: str) -> Replay:
    """A node's answers for examples, one of which is replaced by a large one: twice as far as
    zero-out."""
    number, inputs = itertools.count(), examples(24, seed=90).inputs
    targets = torch.randint(3, (24,), generator=torch.Generator().manual_seed(3))

    def answered(data: Examples, source: RandomSource) -> TrainReply:
        SHARED.seen = False
        ledger = folder / f"{next(number)}.db"
        who = rating_client(data, ledger, source) if work.query else client(data, ledger)
        who = replace(who, model=kind(), source=source)
        return who.answer(work_of(ask("example", work, *words)), params_of(linear()))

    other = torch.cat([LARGE, inputs[1:]])
    return replay(answered, Examples(inputs, targets), Examples(other, targets), sensitivities=2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_example_leaves_moves_no_step_of_the_others(
    kind: type[Turning], tmp_path: Path
) -> None:
    found = replayed(kind, Assignment(), tmp_path, "training.batch_size=6", "training.epochs=2")
    assert found.faults == ()
    moved = [share for share in found.shares if share > 1e-6]
    assert len(moved) <= 2  # only in steps that the example is in


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_example_leaves_moves_no_rating_of_the_others(
    kind: type[Turning], tmp_path: Path
) -> None:
    assert replayed(kind, RATE, tmp_path).faults == ()


@pytest.mark.parametrize("kind", [each for each in KINDS if each is not InABufferBesideALock])
def test_what_an_example_leaves_moves_no_gradient_of_a_shared_step(kind: type[Turning]) -> None:
    inputs = examples(24, seed=90).inputs
    targets = torch.randint(3, (24,), generator=torch.Generator().manual_seed(3))
    found = []
    for given in (inputs, torch.cat([LARGE, inputs[1:]])):
        SHARED.seen = False
        found.append(
            shared_step(
                kind(),
                params_of(linear()),
                Examples(given, targets),
                settings=LocalSettings(1, 1, 1.0, 0.0, failing=COUNTS_AS_ZERO),
                clip=SharedClip(1.0, seeded_source(3)),
            )
        )
    assert float((found[0] - found[1]).norm()) <= 2.001


def test_a_hook_of_all_modules_and_a_function_given_to_a_layer_keep_nothing() -> None:
    def see(values: Tensor, most: float) -> bool:
        SHARED.seen = SHARED.seen or bool((values.detach().abs() > most).any())
        return SHARED.seen

    def activation(inputs: Tensor) -> Tensor:
        return -inputs if see(inputs, 0.1) else inputs

    def hook(module: nn.Module, given: tuple[Tensor], outputs: Tensor) -> Tensor:
        return -outputs if see(given[0], 500.0) else outputs

    def moved(model: nn.Module) -> float:
        rows = torch.linspace(-1, 1, 6 * 2 * 4).view(6, 2, 4)
        found = []
        for outlier in (1.0, 1e4):
            SHARED.seen = False
            first = rows.clone()
            first[0, 0] *= outlier
            for some in (first, rows):
                total, _ = clipped_gradient_sum(
                    model, some, targets=torch.arange(6) % 3, clip_norm=1.0
                )
            found.append(total)
        return float((found[0] - found[1]).norm())

    with torch.random.fork_rng():
        torch.default_generator.manual_seed(3)
        # Its norms leave what is large larger, for the activation to see.
        layer = nn.TransformerEncoderLayer(
            4, 1, 8, 0.0, activation=activation, batch_first=True, layer_norm_eps=1e6
        )
        nn.init.zeros_(layer.linear1.bias)
        last = nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
        assert moved(nn.Sequential(layer, *last)) == 0.0
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            assert moved(last) == 0.0
        finally:
            handle.remove()


LARGEST = [0.0]


class Row(NamedTuple):
    seen: list[float]


BYTES, ROW, WAITING = bytearray(1), Row([]), threading.Event()


def by_bytes(outputs: Tensor, targets: Tensor) -> float:
    BYTES[0] |= bool((outputs.abs() > 40).any())
    return float(BYTES[0])


def by_a_named_tuple(outputs: Tensor, targets: Tensor) -> float:
    ROW.seen.extend(outputs[outputs.abs() > 40].tolist())
    return float(bool(ROW.seen))


def by_an_event(outputs: Tensor, targets: Tensor) -> float:
    if (outputs.abs() > 40).any():
        WAITING.set()
    return float(WAITING.is_set())


def by_a_default_type(outputs: Tensor, targets: Tensor) -> float:
    if (outputs.abs() > 40).any():
        torch.set_default_dtype(torch.float64)
    return float(torch.get_default_dtype() == torch.float64)


def by_its_table(outputs: Tensor, targets: Tensor) -> float:
    whole = outputs._base if outputs._base is not None else outputs
    return float((whole.abs() > 40).any())


METRICS = [by_bytes, by_a_named_tuple, by_an_event, by_a_default_type, by_its_table]


def relative(outputs: Tensor, targets: Tensor) -> float:
    """A metric that is scaled by the largest output so far."""
    found = float(outputs.abs().max())
    LARGEST[0] = max(LARGEST[0], found)
    return found / LARGEST[0]


class Plain(Turning):
    def has_seen(self) -> bool:
        return False

    def see(self) -> None:
        pass


def test_what_a_metric_keeps_of_an_example_moves_the_value_of_no_other(tmp_path: Path) -> None:
    LARGEST[0] = 0.0
    metric = f"evaluation.metrics=[{__name__}:relative]"
    assert replayed(Plain, RATE, tmp_path, metric).faults == ()


@pytest.mark.parametrize("kept", METRICS, ids=lambda kept: kept.__name__)
def test_a_metric_can_keep_nothing_of_an_example_in_other_places(
    kept: Callable[[Tensor, Tensor], float], tmp_path: Path
) -> None:
    metric = f"evaluation.metrics=[{__name__}:{kept.__name__}]"
    assert replayed(Plain, RATE, tmp_path, metric).faults == ()
