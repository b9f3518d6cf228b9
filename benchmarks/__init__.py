"""Benchmarks: each module prints a table of measurements."""
