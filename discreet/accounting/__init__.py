"""Epsilons: events, privacy loss distributions, Renyi divergences, calibration of noise."""
