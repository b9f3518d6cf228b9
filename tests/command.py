"""Verbs of the command `discreet`, as functions of their words that give the exit code."""

from __future__ import annotations

from functools import partial

from discreet.cli.main import main


def _run(verb: str, words: list[str]) -> int:
    return main([verb, *words])


advise, audit, calibrate, data, export, ledger, new, predict = (
    partial(_run, verb)
    for verb in ("advise", "audit", "calibrate", "data", "export", "ledger", "new", "predict")
)
plan, report, run, simulate, statistics, status, tune = (
    partial(_run, verb)
    for verb in ("plan", "report", "run", "simulate", "statistics", "status", "tune")
)
