"""Writes a run's model as a folder that PyTorch and scikit-learn load without Discreet.

RUN is a run folder. FOLDER must be new or empty. It gets the model (model.pt2, model.safetensors),
its description (model.json), the encoding of cells (encoding.py and two more), a class with
predict_proba (classifier.py), an example that was run (example.py), and a model card (README.md).
Only the model itself comes from the clients' data.

examples:
  discreet export outputs/first exported
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from discreet.reporting.model_export import export_model


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
) -> None:
    """Exports, and prints the output of the example."""
    print(export_model(run, folder), end="")
    print(f"written to {folder.resolve()}: README.md is the model card")
