"""The `discreet` command: one file a verb. What a verb needs is imported when it runs."""
