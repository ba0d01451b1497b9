"""The calls about logs: kept entries by time, and live streams of both back ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2, task_command_router_pb2

from servers.modal_account import Account
from servers.modal_control_plane import SandboxCalls
from servers.modal_sandboxes import LogEntry, Sandbox

MAX_RANGE_NS = int(timedelta(days=35).total_seconds() * 1e9)
POLL_S = 0.02


class LogCalls:
    """Answers the calls that read what sandboxes wrote."""

    def __init__(self, account: Account, calls: SandboxCalls) -> None:
        self._account = account
        self._calls = calls

    async def AppFetchLogs(self, request: Any, metadata: Any) -> api_pb2.AppFetchLogsResponse:
        """Return the last entries of a span of time, in their order, a batch for each sandbox's part of them."""
        newest = self._entries(request)[-request.limit :] if request.limit else []
        batches: list[api_pb2.TaskLogsBatch] = []
        for sandbox, entry in newest:
            if not batches or batches[-1].task_id != sandbox.task_id:
                batches.append(api_pb2.TaskLogsBatch(task_id=sandbox.task_id, sandbox_id=sandbox.sandbox_id))
            batches[-1].items.append(entry.message())
        return api_pb2.AppFetchLogsResponse(batches=batches)

    async def AppCountLogs(self, request: Any, metadata: Any) -> api_pb2.AppCountLogsResponse:
        """Count entries in buckets, whose borders are multiples of their length."""
        length_ns = request.bucket_secs * 10**9
        start = request.since.ToNanoseconds() // length_ns * length_ns
        reply = api_pb2.AppCountLogsResponse(app_id=request.app_id)
        for border in range(start, request.until.ToNanoseconds(), length_ns):
            reply.buckets.add().bucket_start_at.FromNanoseconds(border)
        for _, entry in self._entries(request):
            bucket = reply.buckets[min((entry.timestamp_ns - start) // length_ns, len(reply.buckets) - 1)]
            if entry.file_descriptor == api_pb2.FILE_DESCRIPTOR_STDOUT:
                bucket.stdout_logs += 1
            else:
                bucket.stderr_logs += 1
        return reply

    async def AppGetLogs(self, request: Any, metadata: Any) -> AsyncIterator[api_pb2.TaskLogsBatch]:
        """Follow an app's entries for as long as was asked; whoever has seen some comes back with the last one's id."""
        deadline = time.monotonic() + request.timeout
        seen = int(request.last_entry_id or 0)
        while True:
            for sandbox, entry in sorted(self._all(request), key=lambda pair: pair[1].timestamp_ns):
                if entry.timestamp_ns > seen and request.file_descriptor in (0, entry.file_descriptor):
                    seen = entry.timestamp_ns
                    yield api_pb2.TaskLogsBatch(
                        task_id=sandbox.task_id,
                        sandbox_id=sandbox.sandbox_id,
                        items=[entry.message()],
                        entry_id=str(seen),
                    )
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(POLL_S)

    async def SandboxGetLogs(self, request: Any, metadata: Any) -> AsyncIterator[api_pb2.TaskLogsBatch]:
        """Follow one stream of a V1 sandbox. Only the end of its output is marked; a timeout just ends the call."""
        sandbox = self._calls.find(request.sandbox_id, is_v2=False)
        deadline = time.monotonic() + request.timeout
        seen = int(request.last_entry_id or 0)
        while True:
            ended = sandbox.result is not None
            for entry in sandbox.logs[seen:]:
                seen = entry.number
                if entry.file_descriptor == request.file_descriptor:
                    yield api_pb2.TaskLogsBatch(
                        task_id=sandbox.task_id, items=[entry.message()], entry_id=str(entry.number)
                    )
            if ended:
                yield api_pb2.TaskLogsBatch(task_id=sandbox.task_id, entry_id=str(seen), eof=True)
                return
            if len(sandbox.logs) == seen and not await sandbox.news(deadline):
                return

    async def SandboxStdioReadV2(
        self, request: Any, metadata: Any
    ) -> AsyncIterator[task_command_router_pb2.SandboxStdioReadV2Response]:
        """Follow one stream of a V2 sandbox from an offset on, until its output ends."""
        sandbox = next((one for one in self._calls.sandboxes.values() if one.task_id == request.task_id), None)
        if sandbox is None:
            raise GRPCError(Status.NOT_FOUND, f"Task {request.task_id} not found")
        stderr = task_command_router_pb2.SANDBOX_STDIO_FILE_DESCRIPTOR_STDERR
        output = sandbox.output[2 if request.file_descriptor == stderr else 1]
        offset = request.offset
        while True:
            ended = sandbox.result is not None
            if data := bytes(output[offset:]):
                yield task_command_router_pb2.SandboxStdioReadV2Response(data=data, starting_offset=offset)
                offset += len(data)
            elif ended:
                return
            else:
                await sandbox.news(until=time.monotonic() + 60)

    def _entries(self, request: Any) -> list[tuple[Sandbox, LogEntry]]:
        since, until = request.since.ToNanoseconds(), request.until.ToNanoseconds()
        if until - since > MAX_RANGE_NS:
            raise GRPCError(Status.INVALID_ARGUMENT, "Time range cannot exceed 35 days.")
        found = [
            (sandbox, entry)
            for sandbox, entry in self._all(request)
            if since <= entry.timestamp_ns <= until
            and request.source in (0, entry.file_descriptor)
            and request.search_text in entry.text
        ]
        return sorted(found, key=lambda pair: pair[1].timestamp_ns)

    def _all(self, request: Any) -> list[tuple[Sandbox, LogEntry]]:
        if request.app_id not in self._account.apps:
            raise GRPCError(Status.NOT_FOUND, f"App {request.app_id!r} not found")
        return [
            (sandbox, entry)
            for sandbox in self._calls.sandboxes.values()
            if sandbox.app_id == request.app_id
            and request.task_id in ("", sandbox.task_id)
            and request.sandbox_id in ("", sandbox.sandbox_id)
            for entry in sandbox.logs
        ]
