"""Under secure aggregation a guard counts on the noise of the others: so all of them are guards, by
the list of peers that people compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict

import discreet
from discreet import DPFedAvg, FixedClipping, MaskedGaussian
from discreet.deployment import supernode
from discreet.deployment.certificates import make_authority, make_node, make_peers
from discreet.guard.site_guard import SiteGuard
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.identity import IdentityError
from discreet.node.account import Refused
from discreet.node.secure_aggregation import files_of, read_identity
from discreet.privacy.secure_grid import SecureSum
from discreet.server.transport import NobodyAnswers
from tests.flower.flower_apps import FakeGrid
from tests.guard.made import RUN, C, PlayedSandbox, arrays, site
from tests.guard.test_block_release import APP, PATIENTS, opposed

NOISE = 2.0
Config = dict[str, str | int]


def peers_of(folder: Path, names: Sequence[str]) -> dict[str, Config]:
    """What the owner of each node has set up for secure aggregation."""
    for name in names:
        make_node(folder, name)
    peers = make_peers(folder)
    return {
        name: {
            "name": name,
            "identity-key": str(folder / "nodes" / f"{name}.key"),
            "peers": str(peers),
            "masking-state": str(folder / f"{name}.masking"),
        }
        for name in names
    }


def guarded(folder: Path, config: Config) -> Callable[[Message], RecordDict | Error]:
    """A node with a guard."""
    policy = site(folder, PATIENTS, min_noise_multiplier=1.0, max_epsilon=50.0)
    guard = SiteGuard(policy, sandbox=PlayedSandbox(opposed))  # type: ignore[arg-type]

    def answer(message: Message) -> RecordDict | Error:
        given = Message(RecordDict(dict(message.content)), dst_node_id=1, message_type="train")
        given.metadata.__dict__.update(message.metadata.__dict__)
        try:
            return guard.answer(given, Context(RUN, 1, config, RecordDict(), {}), APP).content
        except Refused as refusal:
            return Error(0, str(refusal))

    return answer


def without_noise(config: Config, ledger: Path) -> Callable[[Message], RecordDict | Error]:
    """A node without a guard, whose app is a researcher's: it adds no noise."""
    DurableLedger.create(ledger)
    context = Context(RUN, 4, {**config, "ledger": str(ledger)}, RecordDict(), {})
    silent = patch.object(SecureSum, "noise", lambda self, source: torch.zeros(self.length).long())

    def answer(message: Message) -> RecordDict | Error:
        with silent:
            reply = discreet.secure_sum_mod(message, context, lambda asked, _: asked)
        return reply.error if reply.has_error() else reply.content

    return answer


def run(folder: Path, grid: FakeGrid) -> None:
    """One round of a server that reads a masked sum."""
    clipping = FixedClipping(norm=C)
    mechanism = MaskedGaussian(
        noise_multiplier=NOISE, delta=1e-5, clipping=clipping, too_noisy="warn"
    )
    strategy = DPFedAvg(
        population_size=4,
        min_available_nodes=4,
        sampling="everyone",
        mechanism=mechanism,
        output_dir=str(folder),
    )
    strategy.start(grid, arrays(), num_rounds=1, timeout=5.0)  # type: ignore[arg-type]


def charged(folder: Path) -> int:
    return DurableLedger(folder / "ledger.db").spent("patient").num_releases


def test_a_node_without_a_guard_is_in_no_sum_of_guards(tmp_path: Path) -> None:
    names = ["a.guard", "b.guard", "c.guard", "d"]
    configs = peers_of(tmp_path / "keys", names)
    answers = {
        number: guarded(tmp_path / name, configs[name]) for number, name in enumerate(names[:3], 1)
    }
    answers[4] = without_noise(configs["d"], tmp_path / "d.db")
    with pytest.raises(NobodyAnswers):
        run(tmp_path / "run", FakeGrid(answers))
    assert [charged(tmp_path / name) for name in names[:3]] == [0, 0, 0]


def test_guards_alone_add_up(tmp_path: Path) -> None:
    names = ["a.guard", "b.guard", "c.guard", "d.guard"]
    configs = peers_of(tmp_path / "keys", names)
    answers = {
        number: guarded(tmp_path / name, configs[name]) for number, name in enumerate(names, 1)
    }
    run(tmp_path / "run", FakeGrid(answers))
    assert [charged(tmp_path / name) for name in names] == [1, 1, 1, 1]


def test_a_guard_whose_list_of_peers_has_a_node_without_one_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = peers_of(tmp_path, ["a.guard", "b.guard", "c"])["a.guard"]
    made = ["--superlink", "fl.example.org:9092", "--authority", str(authority(tmp_path))]
    keys = ["--key", str(files["identity-key"]), "--peers", str(files["peers"])]
    assert supernode.main([*made, *keys, "--guard", str(tmp_path / "guard.toml")]) == 2
    assert "sums with other guards" in capsys.readouterr().out


def test_no_app_gets_a_guards_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = peers_of(tmp_path, ["a.guard", "b", "c"])["a.guard"]
    with pytest.raises(IdentityError, match="belongs to a guard"):
        read_identity(files_of(None, config))
    made = ["--superlink", "fl.example.org:9092", "--authority", str(authority(tmp_path))]
    words = ["--key", str(config["identity-key"]), "--ledger", "l.db", "--data", str(tmp_path)]
    assert supernode.main([*made, *words]) == 2
    assert "is a guard's key" in capsys.readouterr().out


def authority(folder: Path) -> Path:
    """The certificate of a federation."""
    make_authority(folder)
    return folder / "ca.crt"
