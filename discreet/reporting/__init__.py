"""Run folders to tables and pictures; `discreet/reporting/page.py` is the way in."""
