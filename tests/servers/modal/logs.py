"""Answers the calls about logs: entries by their time."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from servers.modal.account import Account
from servers.modal.control_plane import SandboxCalls
from servers.modal.sandboxes import LogEntry

MAX_RANGE_NS = int(timedelta(days=35).total_seconds() * 1e9)


class LogCalls:
    """Answers the calls that count and read the output of sandboxes."""

    def __init__(self, account: Account, calls: SandboxCalls) -> None:
        self._account = account
        self._calls = calls

    async def AppCountLogs(self, request: Any, metadata: Any) -> api_pb2.AppCountLogsResponse:
        """Return the number of log entries of an app, or of one of its sandboxes, in each interval of a period."""
        entries, size_ns = self._entries(request), request.bucket_secs * 10**9
        counts = Counter(entry.timestamp_ns // size_ns for _, entry in entries)
        reply = api_pb2.AppCountLogsResponse()
        for number in range(min(counts, default=0), max(counts, default=-1) + 1):
            bucket = reply.buckets.add(stdout_logs=counts[number])
            bucket.bucket_start_at.FromNanoseconds(number * size_ns)
        return reply

    async def AppFetchLogs(self, request: Any, metadata: Any) -> api_pb2.AppFetchLogsResponse:
        """Return the last log entries of an app, or of one of its sandboxes, in a period."""
        reply = api_pb2.AppFetchLogsResponse()
        for task, entry in self._entries(request)[-request.limit :]:
            reply.batches.add(task_id=task).items.append(entry.message())
        return reply

    def _entries(self, request: Any) -> list[tuple[str, LogEntry]]:
        since, until = request.since.ToNanoseconds(), request.until.ToNanoseconds()
        if until - since > MAX_RANGE_NS:
            raise GRPCError(Status.INVALID_ARGUMENT, "Time range cannot exceed 35 days.")
        if request.app_id not in self._account.apps:
            raise GRPCError(Status.NOT_FOUND, f"App {request.app_id!r} not found")
        boxes = (box for box in self._calls.sandboxes.values() if box.app_id == request.app_id)
        found = [
            (box.task_id, entry)
            for box in boxes
            if request.task_id in ("", box.task_id)
            for entry in box.logs
            if since <= entry.timestamp_ns <= until
        ]
        return sorted(found, key=lambda pair: pair[1].timestamp_ns)
