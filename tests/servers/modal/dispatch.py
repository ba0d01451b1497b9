"""Dispatches each call: records it, checks its credentials, applies a fault, and answers it with a method.

The handlers are made from the tables of the SDK's own stubs, so every call reaches this server. A call without an
implementation gets the answer UNIMPLEMENTED and is recorded, so that its test fails.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from google.protobuf.message import Message
from grpclib import GRPCError, Status
from grpclib.const import Handler
from modal_proto.api_grpc import ModalClientBase

from servers.modal.faults import ConnectionLostError, Faults

Metadata = Mapping[str, str]
CREATES = ("SandboxCreate", "SandboxCreateV2")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that the server received."""

    rpc: str
    request: Any
    metadata: dict[str, str]

    def carries(self, value: str) -> bool:
        """Return True if the request contains a text unchanged, in any field."""
        return value.encode() in self.request.SerializeToString()


class Dispatcher:
    """Answers calls with the methods of objects that have the names of the calls.

    A method is a coroutine. It gets the request and the metadata, and returns the reply. To refuse, it raises
    GRPCError.
    """

    def __init__(self, objects: list[object], check: Callable[[str, Metadata], None], faults: Faults) -> None:
        self.calls: list[Call] = []
        self.unimplemented: set[str] = set()
        self.deduplicates = True
        """True if a create that is repeated with the same idempotency key returns the same sandbox."""
        self.together: dict[str, int] = {}
        """The number of calls of a name that must arrive before the first is answered."""
        self._objects = objects
        self._check = check
        self._faults = faults
        self._replies: dict[tuple[str, str], Message] = {}
        self._transports: set[Any] = set()

    def disconnect(self) -> None:
        """Cut every connection, and so all calls that have no answer yet."""
        for transport in self._transports:
            transport.abort()
        self._transports.clear()

    def __mapping__(self) -> dict[str, Handler]:
        table = type("Calls", (ModalClientBase,), {})
        table.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # every class of an ABC has it
        return {
            path: handler._replace(func=self._handler(path.rpartition("/")[2]))
            for path, handler in table().__mapping__().items()
        }

    def _handler(self, rpc: str) -> Callable[[Any], Coroutine[Any, Any, None]]:
        method = next((getattr(owner, rpc) for owner in self._objects if hasattr(owner, rpc)), None)

        async def handle(stream: Any) -> None:
            self._transports.add(stream._stream._transport)
            request = await stream.recv_message()
            metadata = {name: value for name, value in stream.metadata.items() if isinstance(value, str)}
            self.calls.append(Call(rpc, request, metadata))
            if method is None:
                self.unimplemented.add(rpc)
                raise GRPCError(Status.UNIMPLEMENTED, f"The server of the tests knows no {rpc}.")
            try:
                self._check(rpc, metadata)
                while sum(call.rpc == rpc for call in self.calls) < self.together.get(rpc, 0):
                    await asyncio.sleep(0.01)
                await self._answer(rpc, stream, request, metadata, method)
            except ConnectionLostError:
                return

        return handle

    async def _answer(self, rpc: str, stream: Any, request: Any, metadata: Metadata, method: Any) -> None:
        fault = self._faults.take(rpc, request)
        if fault and not fault.after_applying:
            fault.strike(stream)
        key = (rpc, metadata.get("x-idempotency-key", ""))
        if self.deduplicates and key in self._replies:
            reply = self._replies[key]
        else:
            reply = await method(request, metadata)
            if rpc in CREATES:
                self._replies[key] = reply
        if fault and fault.after_applying:
            fault.strike(stream)
        await stream.send_message(reply)
