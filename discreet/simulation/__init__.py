"""The federation in one process, without Ray."""
