"""Tables and pictures from run folders; start with `discreet/reporting/page.py`."""
