"""Files as others make them, damaged by a seed, and the doors that read them."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import signal
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import pyarrow
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pyarrow import parquet

from discreet.cli.main import main
from discreet.guard.guard_policy import read_guard
from discreet.guard.site_blocks import read_split
from discreet.masking.identity import Directory, Identity, IdentityError
from discreet.node.account import Refused
from discreet.node.policy import policy_from
from discreet.settings.rules import ConfigError
from tests.command import data

SECONDS = 20  # within which each file is read or refused
ROWS = 12
CSV = "patient;seen;age;dose;sex;note;y\n" + "".join(
    f"P{row};0{row % 9 + 1}.02.2022;{20 + row};{row},5;{'FM'[row % 2]};seen {row};{row % 2}\n"
    for row in range(ROWS)
)
COLUMNS = """
[columns]
age = [0, 110]
dose = { kind = "number", low = 0, high = 20, missing = "middle", curves = 3, below = "half" }
seen = { kind = "date", low = 2020-01-01, high = 2022-12-31, format = ["%d.%m.%Y", "%Y-%m-%d"] }
word = { kind = "category", levels = ["F", "M"], missing = "category", named = "sex" }
note = { kind = "text", width = 4 }
[[pairs]]
columns = ["age", "dose"]
"""
POLICY = {"max-epsilon": 4.0, "max-delta": 1e-5, "min-noise-multiplier": 1, "require": ["user"]}
GUARD = """ledger = "ledger.db"
any = true
charge = "all-blocks"
max-epsilon = 4.0
max-delta = 1e-5
min-noise-multiplier = 1.0
block-seconds = 20
[blocks]
folder = "site"
id = "patient"
count = 100
[limits]
memory-mb = 4096
"""
# Values that replace a token of a text.
TOKENS = (
    *('"a"', "5", "-1", "1e308", "-1e308", "nan", "true", "[]", "{}", "[[1]]", '{ a = "b" }'),
    *('"\\u0000"', '""', "9" * 5000, "[" * 3000, "{" * 3000, '{"a":' * 3000, "2022-01-01", "'"),
    *("\u0661\u0662", "1_000", "<5", "..", "/", "null", "\udc80", "\x00", "x" * 200_000, "="),
)


def toml_of(form: str, more: str = "") -> str:
    return (
        f'format = "{form}"\nfile = "t.{form}"\ntarget = "y"\nowner = "patient"\nnum_classes = 2\n'
        f"{more}"
    )


def plain_rows() -> dict[str, list[object]]:
    rows = range(ROWS)
    return {
        "patient": [f"P{row}" for row in rows],
        "age": [20 + row for row in rows],
        "dose": [row / 2 for row in rows],
        "y": [row % 2 for row in rows],
    }


def jsonl() -> bytes:
    columns = plain_rows()
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def parquet_file() -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table(plain_rows()), sink)
    return sink.getvalue()


def npz() -> bytes:
    sink = io.BytesIO()
    arrays = {"inputs": np.arange(ROWS * 3.0).reshape(ROWS, 3), "y": np.arange(ROWS) % 2}
    np.savez(sink, allow_pickle=False, patient=np.array(plain_rows()["patient"]), **arrays)
    return sink.getvalue()


def npz_with_header(header: str, version: int = 1) -> bytes:
    """An npz file whose inputs have this text as a header."""
    sink = io.BytesIO()
    text = header.encode() + b" " * (63 - (len(header) + 10) % 64) + b"\n"
    with zipfile.ZipFile(sink, "w") as archive:
        length = len(text).to_bytes(2, "little")
        archive.writestr("inputs.npy", b"\x93NUMPY" + bytes([version, 0]) + length + text)
        labels = io.BytesIO()
        np.save(labels, np.arange(ROWS) % 2)
        archive.writestr("y.npy", labels.getvalue())
    return sink.getvalue()


def encrypted(content: bytes) -> bytes:
    """An npz file whose members say that they are encrypted."""
    changed = bytearray(content)
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = changed.find(mark)
        while at >= 0:
            changed[at + place] |= 1
            at = changed.find(mark, at + 1)
    return bytes(changed)


def idx() -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in (ROWS, 2, 2))
    return b"\x00\x00\x08\x03" + sizes + bytes(range(4 * ROWS))


@dataclass(frozen=True)
class Door:
    """A way in for files.

    Attributes:
      files: valid files by their names, the one that is damaged first.
      enter: reads them in a folder; an exit status, or an error that the door may raise.
    """

    files: Mapping[str, bytes]
    enter: Callable[[Path], object]


def _check(name: str) -> Callable[[Path], object]:
    return lambda folder: data(["check", str(folder / name)])


def _adopt(folder: Path) -> object:
    return data(["adopt", str(folder / "shared.toml"), "--table", str(folder / "t.csv")])


def _site_split(name: str) -> Callable[[Path], object]:
    def enter(folder: Path) -> object:
        words = ["--id", "patient", "--blocks", "3", "--out", str(folder / "site")]
        return main(["site", "split", str(folder / name), *words, "--public-types"])

    return enter


def _policy(folder: Path) -> object:
    return policy_from({"policy": str(folder / "policy.json")})


def doors() -> dict[str, Door]:
    """Every door for tables and descriptions, by name."""
    csv = CSV.encode()
    described = toml_of("csv", f'decimal = ","\n{COLUMNS}').encode()
    plain = toml_of("csv", 'decimal = ","\ninputs = ["age", "dose"]\n').encode()
    columns = re.sub(r', (format|named) = (\[.*\]|".*")', "", COLUMNS.replace("word", "sex"))
    shared = f'target = "y"\nclasses = ["0", "1"]\n{columns}'.encode()
    peers = json.dumps({name: _public_key(name) for name in "ab"}).encode()
    arrays = toml_of("npz").encode()
    images = toml_of("idx").replace('owner = "patient"\n', "").replace('"y"', '"l.idx"').encode()
    labels = b"\x00\x00\x08\x01" + ROWS.to_bytes(4, "big") + bytes(row % 2 for row in range(ROWS))
    rows = toml_of("jsonl", 'inputs = ["age", "dose"]\n').encode()
    toml = "data.toml"
    return {
        "csv proposed": Door({"t.csv": csv}, _check("t.csv")),
        "csv described": Door({"t.csv": csv, toml: described}, _check("t.csv")),
        "csv plain": Door({"t.csv": csv, toml: plain}, _check("t.csv")),
        "csv split": Door({"t.csv": csv}, _split),
        "data.toml": Door({toml: described, "t.csv": csv}, _check(toml)),
        "data.toml plain": Door({toml: plain, "t.csv": csv}, _check(toml)),
        "data.toml npz": Door({toml: arrays, "t.npz": npz()}, _check(toml)),
        "jsonl": Door({"t.jsonl": jsonl(), toml: rows}, _check(toml)),
        "parquet": Door(
            {"t.parquet": parquet_file(), toml: rows.replace(b"jsonl", b"parquet")}, _check(toml)
        ),
        "npz": Door({"t.npz": npz(), toml: arrays}, _check(toml)),
        "idx": Door({"t.idx": idx(), "l.idx": labels, toml: images}, _check(toml)),
        "shared.toml": Door({"shared.toml": shared, "t.csv": csv}, _adopt),
        "site split csv": Door({"t.csv": csv}, _site_split("t.csv")),
        "site split jsonl": Door({"t.jsonl": jsonl()}, _site_split("t.jsonl")),
        "site split parquet": Door({"t.parquet": parquet_file()}, _site_split("t.parquet")),
        "site split npz": Door({"t.npz": npz()}, _site_split("t.npz")),
        "site split data.toml": Door({toml: plain, "t.csv": csv}, _site_split("")),
        "guard.toml": Door(
            {"guard.toml": GUARD.encode()}, lambda at: read_guard(at / "guard.toml")
        ),
        "split.json": Door(
            {"split.json": b'{"id": "patient", "count": 3, "patients": 9, "digests": []}'},
            read_split,
        ),
        "policy": Door({"policy.json": json.dumps(POLICY).encode()}, _policy),
        "peers": Door({"peers.json": peers}, lambda at: Directory.read(at / "peers.json")),
    }


def doors_of_run(run: Path) -> dict[str, Door]:
    """The doors that read the files of a run folder, for which `t.csv` is a table."""
    kept = {
        f"run/{path.relative_to(run)}": path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }
    kept["t.csv"] = CSV.encode()
    named = ("model.json", "model.safetensors", "config.yaml", "shapes.json", "privacy.json")
    found = {}
    for name in named:
        first = {f"run/{name}": kept[f"run/{name}"]}
        found[f"predict {name}"] = Door(first | kept, _predict)
        found[f"report {name}"] = Door(first | kept, _report)
    found["predict t.csv"] = Door({"t.csv": CSV.encode()} | kept, _predict)
    return found


def _predict(folder: Path) -> object:
    out = str(folder / "out.csv")
    return main(["predict", str(folder / "run"), "--data", str(folder / "t.csv"), "--out", out])


def _report(folder: Path) -> object:
    return main(["report", str(folder / "run")])


def _public_key(name: str) -> str:
    key = Identity.generate(name).key.public_key()
    form = PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(Encoding.PEM, form).decode()


def _split(folder: Path) -> object:
    return data(["split", str(folder / "t.csv"), "--owner", "patient"])


def damaged(content: bytes, draws: random.Random) -> bytes:
    """The content with one or several damages."""
    for _ in range(draws.choice((1, 1, 1, 2, 4))):
        content = draws.choice(DAMAGES)(content, draws)
    return content


def _flip(content: bytes, draws: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draws.choice((1, 3, 20))):
        if changed:
            changed[draws.randrange(len(changed))] ^= 1 << draws.randrange(8)
    return bytes(changed)


def _cut(content: bytes, draws: random.Random) -> bytes:
    return content[: draws.randrange(len(content) + 1)]


def _insert(content: bytes, draws: random.Random) -> bytes:
    at = draws.randrange(len(content) + 1)
    some = draws.choice((draws.randbytes(8), b"\0", b"\xff", b'"', b"\n", b";", b"[" * 9000))
    return content[:at] + some + content[at:]


def _twice(content: bytes, draws: random.Random) -> bytes:
    begin = draws.randrange(len(content) + 1)
    end = draws.randrange(begin, len(content) + 1)
    return content[:end] + content[begin:]


def _token(content: bytes, draws: random.Random) -> bytes:
    """Another value in place of a word, number or text."""
    begins = [at for at in range(len(content)) if content[at : at + 1].isalnum()]
    if not begins:
        return content
    begin = end = draws.choice(begins)
    while begin > 0 and content[begin - 1 : begin].isalnum():
        begin -= 1
    while end < len(content) and content[end : end + 1].isalnum():
        end += 1
    token = draws.choice(TOKENS).encode("utf-8", "surrogatepass")
    if (
        content[begin - 1 : begin] == b'"'
        and content[end : end + 1] == b'"'
        and draws.random() < 0.7
    ):
        return content[: begin - 1] + token + content[end + 1 :]
    return content[:begin] + token + content[end:]


DAMAGES = (_flip, _cut, _insert, _twice, _token, _token, _token)


class Late(BaseException):
    """A door took longer than `SECONDS`. No reader may take it for an error of a library."""


@contextlib.contextmanager
def within_seconds() -> Iterator[None]:
    """Raises Late after `SECONDS`."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Outcome:
    """How a door took a file: `accepted`, or refused; `fault`: what a user should never see."""

    accepted: bool
    fault: str = ""


def outcome_of(door: Door, folder: Path, content: bytes | None = None) -> Outcome:
    """The outcome of a door with this content in place of its first file."""
    for place, (name, valid) in enumerate(door.files.items()):
        damaged_one = content is not None and place == 0
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if damaged_one and content is not None else valid)
    err = io.StringIO()
    out = io.StringIO()
    try:
        with within_seconds(), contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            status = door.enter(folder)
    except (ConfigError, IdentityError, Refused) as error:
        return Outcome(False, f"several lines: {error}" if "\n" in str(error) else "")
    except Late:
        return Outcome(False, f"longer than {SECONDS} s")
    except BaseException as error:  # noqa: BLE001 - what a user would see as a traceback
        return Outcome(False, f"{type(error).__name__}: {error}")
    said = err.getvalue()
    if status == 2 and sum(line.startswith("discreet: ") for line in said.splitlines()) != 1:
        return Outcome(False, f"not one line: {said[:200]}")
    return Outcome(status != 2)
