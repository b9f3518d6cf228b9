"""Reading what clients sent: any error is one line about a malformed message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from discreet.masking.wire import MalformedBytes
from discreet.protocol.messages import MalformedMessage
from discreet.server.transport import readable


@contextmanager
def strange() -> Iterator[None]:
    """A context for reading untrusted contents: any exception in it becomes MalformedMessage."""
    try:
        yield
    except (MalformedMessage, MalformedBytes) as error:
        raise MalformedMessage(readable(str(error))) from error
    except Exception as error:  # Flower, protobuf and NumPy raise errors of many classes
        raise MalformedMessage(f"the reply can't be decoded: {type(error).__name__}") from error
