"""The call about logs: kept entries by time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from servers.modal.account import Account
from servers.modal.control_plane import SandboxCalls
from servers.modal.sandboxes import LogEntry

MAX_RANGE_NS = int(timedelta(days=35).total_seconds() * 1e9)


class LogCalls:
    """Answers the call that reads what sandboxes wrote."""

    def __init__(self, account: Account, calls: SandboxCalls) -> None:
        self._account = account
        self._calls = calls

    async def AppFetchLogs(self, request: Any, metadata: Any) -> api_pb2.AppFetchLogsResponse:
        """Return the last entries of one sandbox in a span of time, in their order."""
        since, until = request.since.ToNanoseconds(), request.until.ToNanoseconds()
        if until - since > MAX_RANGE_NS:
            raise GRPCError(Status.INVALID_ARGUMENT, "Time range cannot exceed 35 days.")
        if request.app_id not in self._account.apps:
            raise GRPCError(Status.NOT_FOUND, f"App {request.app_id!r} not found")
        reply = api_pb2.AppFetchLogsResponse()
        for sandbox in self._calls.sandboxes.values():
            if request.task_id == sandbox.task_id:
                entries: list[LogEntry] = [each for each in sandbox.logs if since <= each.timestamp_ns <= until]
                batch = reply.batches.add(task_id=sandbox.task_id, sandbox_id=sandbox.sandbox_id)
                batch.items.extend(entry.message() for entry in entries[-request.limit :])
        return reply
