"""The extras of the installation, by the modules that they bring. What `DPSGD` needs is always
installed; the rest of Discreet says which extra it lacks."""

from __future__ import annotations

FEDERATION = ("hydra", "omegaconf", "yaml", "typer", "click", "rich", "Crypto", "google")
EXTRAS = {
    **dict.fromkeys(FEDERATION, "federation"),
    "sklearn": "tables",
    "matplotlib": "report",
    "jinja2": "report",
    **dict.fromkeys(("ray", "flwr_datasets", "datasets", "pyarrow", "pandas"), "simulation"),
    **dict.fromkeys(("httpx", "starlette", "uvicorn"), "deployment"),
    **dict.fromkeys(("transformers", "tokenizers", "peft"), "text"),
}


def not_installed(module: str, why: str) -> str:
    """The line about a module that `why` needs.

    >>> not_installed("sklearn.metrics", "discreet predict")
    'discreet predict needs sklearn, which is not installed: pip install "discreet[tables]"'
    """
    package = module.partition(".")[0]
    line = f"{why} needs {package}, which is not installed: pip install"
    if package in EXTRAS:
        return f'{line} "discreet[{EXTRAS[package]}]"'
    return f"{line} {package}"


def lacking(error: ModuleNotFoundError, why: str) -> str | None:
    """The line about a failed import, if an extra brings the module."""
    if error.name is None or error.name.partition(".")[0] not in EXTRAS:
        return None
    return not_installed(error.name, why)
