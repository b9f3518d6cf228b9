"""The `discreet` command: one file for each verb, which imports its dependencies when it runs."""
