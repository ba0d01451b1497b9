"""The faults of the Modal server of the tests: errors by the name of the call, and lost connections."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from grpclib import GRPCError, Status


@dataclasses.dataclass(kw_only=True)
class Fault:
    """One fault of the calls with a name."""

    rpc: str
    status: Status | None = None
    """The error to answer with."""
    message: str = ""
    times: int = 1
    after_applying: bool = False
    """True if the call has its effect before the fault."""
    loses_connection: bool = False
    """True if the connection breaks, with all other calls on it."""
    when: Callable[[Any], bool] | None = None
    """A condition on the request."""

    def strike(self, stream: Any) -> None:
        if self.loses_connection:
            stream._stream._transport.abort()
            raise ConnectionLostError
        if self.status is not None:
            raise GRPCError(self.status, self.message or f"{self.status.name} as the test asked")


class ConnectionLostError(Exception):
    """The connection has been cut, so no answer is possible."""


class Faults:
    """The planned faults. One thread plans them, and another thread takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[Fault] = []

    def plan(self, fault: Fault) -> None:
        with self._lock:
            self._planned.append(fault)

    def take(self, rpc: str, request: Message) -> Fault | None:
        """Return the first planned fault that fits a call, and count it."""
        with self._lock:
            for fault in self._planned:
                if fault.rpc == rpc and (fault.when is None or fault.when(request)):
                    fault.times -= 1
                    if not fault.times:
                        self._planned.remove(fault)
                    return fault
        return None

    def unused(self) -> list[Fault]:
        """Return the faults that have hit fewer calls than planned."""
        with self._lock:
            return list(self._planned)
