"""What ends a run before it is done, although nothing is wrong with it."""


class RunLostError(RuntimeError):
    """Something that a run needs has ended. The message says what; the run can be resumed."""
