"""Run folders to tables and pictures; `discreet/reports.py` is the way in."""
