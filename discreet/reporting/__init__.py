"""Run folders to tables and pictures; `discreet/reporting/reports.py` is the way in."""
