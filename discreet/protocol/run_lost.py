"""The error that ends a run early although nothing is wrong with the run itself."""


class RunLostError(RuntimeError):
    """Something that a run needs has ended. The message says what; the run can be resumed."""
