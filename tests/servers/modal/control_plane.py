"""Answers the calls about sandboxes, for both back ends of Modal.

The back end V2 has sandboxes without a GPU, and starts them at once. V1 has sandboxes with GPUs, which wait until there
is room. Two facts about the vendor are not known: whether a call of one back end finds the sandboxes of the other, and
whether both share names. Here, such a call gets the answer that is harder for the caller.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from servers.modal.account import Account, new_id
from servers.modal.sandboxes import TERMINATED, Sandbox

PAGE = 3  # the sandboxes on one page of a list; the vendor's pages are larger
UNSUPPORTED = ("nfs_mounts", "s3_mounts", "proxy_id", "enable_snapshot")
"""Parts of a sandbox's definition that local processes cannot provide. Volumes are only recorded."""


class SandboxCalls:
    """Answers the calls that make, find, watch and end sandboxes."""

    def __init__(self, account: Account, folder: Path, bin_folder: Path) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.capacity: int | None = None
        """The number of GPUs. None: always enough."""
        self._account = account
        self._folder = folder
        self._bin_folder = bin_folder

    # Calls of V2

    async def SandboxCreateV2(self, request: Any, metadata: Any) -> api_pb2.SandboxCreateV2Response:
        if request.definition.resources.HasField("gpu_config") and request.definition.resources.gpu_config.count:
            raise GRPCError(Status.INVALID_ARGUMENT, "GPUs are not supported by V2 Sandboxes")
        environment = dict(request.ephemeral_secrets.contents)
        for source in request.secret_sources:
            given = source.env.contents if source.HasField("env") else self._account.variables_of(source.secret_id)
            environment |= dict(given)
        sandbox = self._add(request, environment, is_v2=True)
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=sandbox.sandbox_id, task_id=sandbox.task_id, metadata=described(sandbox)
        )

    async def SandboxWaitV2(self, request: Any, metadata: Any) -> api_pb2.SandboxWaitResponse:
        return await self._wait(self.find(request.sandbox_id, is_v2=True), request.timeout)

    async def SandboxTerminateV2(self, request: Any, metadata: Any) -> api_pb2.SandboxTerminateResponse:
        return await self._terminate(self.find(request.sandbox_id, is_v2=True))

    async def SandboxGetTaskIdV2(self, request: Any, metadata: Any) -> api_pb2.SandboxGetTaskIdResponse:
        return await self._task_id(self.find(request.sandbox_id, is_v2=True))

    async def SandboxGetFromNameV2(self, request: Any, metadata: Any) -> api_pb2.SandboxGetFromNameResponse:
        return self._from_name(request, is_v2=True)

    async def SandboxTagsGetV2(self, request: Any, metadata: Any) -> api_pb2.SandboxTagsGetResponse:
        return tags(self.find(request.sandbox_id, is_v2=True))

    async def SandboxListV2(self, request: Any, metadata: Any) -> api_pb2.SandboxListResponse:
        """List the sandboxes of both back ends that have not ended, newest first, a page at a time."""
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        before = request.before_timestamp or float("inf")
        found = [
            sandbox
            for sandbox in reversed(self.sandboxes.values())
            if sandbox.app_id == request.app_id
            and wanted.items() <= sandbox.tags.items()
            and sandbox.created_at < before
            and (request.include_finished or not sandbox.result)
        ]
        return api_pb2.SandboxListResponse(
            sandboxes=[
                api_pb2.SandboxInfo(id=each.sandbox_id, created_at=each.created_at, metadata=described(each))
                for each in found[:PAGE]
            ]
        )

    # Calls of V1

    async def SandboxCreate(self, request: Any, metadata: Any) -> api_pb2.SandboxCreateResponse:
        environment: dict[str, str] = {}
        for secret_id in request.definition.secret_ids:
            environment |= self._account.variables_of(secret_id)
        sandbox = self._add(request, environment, is_v2=False)
        return api_pb2.SandboxCreateResponse(sandbox_id=sandbox.sandbox_id, metadata=described(sandbox))

    async def SandboxWait(self, request: Any, metadata: Any) -> api_pb2.SandboxWaitResponse:
        return await self._wait(self.find(request.sandbox_id, is_v2=False), request.timeout)

    async def SandboxTerminate(self, request: Any, metadata: Any) -> api_pb2.SandboxTerminateResponse:
        return await self._terminate(self.find(request.sandbox_id, is_v2=False))

    async def SandboxGetTaskId(self, request: Any, metadata: Any) -> api_pb2.SandboxGetTaskIdResponse:
        return await self._task_id(self.find(request.sandbox_id, is_v2=False))

    async def SandboxGetFromName(self, request: Any, metadata: Any) -> api_pb2.SandboxGetFromNameResponse:
        return self._from_name(request, is_v2=False)

    async def SandboxTagsGet(self, request: Any, metadata: Any) -> api_pb2.SandboxTagsGetResponse:
        return tags(self.find(request.sandbox_id, is_v2=False))

    # Shared by both back ends

    def find(self, sandbox_id: str, is_v2: bool | None = None) -> Sandbox:
        """Return a sandbox. A back end does not know the other's sandboxes."""
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None or is_v2 not in (None, sandbox.is_v2):
            raise GRPCError(Status.NOT_FOUND, f"Sandbox with ID {sandbox_id} not found")
        return sandbox

    def _add(self, request: Any, environment: dict[str, str], *, is_v2: bool) -> Sandbox:
        definition = request.definition
        if request.app_id not in self._account.apps:
            raise GRPCError(Status.NOT_FOUND, f"App {request.app_id!r} not found")
        if asked := [field.name for field, _ in definition.ListFields() if field.name in UNSUPPORTED]:
            raise GRPCError(Status.UNIMPLEMENTED, f"The server of the tests cannot give a sandbox {asked}.")
        if not 0 < definition.timeout_secs <= 24 * 3600:
            raise GRPCError(Status.INVALID_ARGUMENT, f"timeout_secs must be 1 to 86400, got {definition.timeout_secs}")
        others = [other for other in self.sandboxes.values() if other.app_id == request.app_id and not other.result]
        if definition.name and any(other.name == definition.name for other in others):
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name {definition.name!r} already exists")
        # The client takes every id for a V2 id that does not have the form of a V1 id, 22 characters of base 62.
        sandbox_id = new_id("sb", 26 if is_v2 else 22)
        task_id = new_id("ta", 21) + ("V" if is_v2 else "1")
        folder = self._folder / sandbox_id
        folder.mkdir()
        by_the_vendor = {
            "MODAL_SANDBOX_ID": sandbox_id,
            "MODAL_TASK_ID": task_id,
            "MODAL_IMAGE_ID": definition.image_id,
            "MODAL_CLOUD_PROVIDER": "CLOUD_PROVIDER_AWS",
            "MODAL_REGION": "us-east-1",
        }
        newest = max((sandbox.created_at for sandbox in self.sandboxes.values()), default=0.0)
        sandbox = self.sandboxes[sandbox_id] = Sandbox(
            sandbox_id=sandbox_id,
            task_id=task_id,
            is_v2=is_v2,
            app_id=request.app_id,
            # pages begin and end at a creation time, so no two may be equal
            created_at=max(time.time(), newest + 1e-5),
            definition=definition,
            tags={tag.tag_name: tag.tag_value for tag in request.tags},
            environment=dict(definition.environment_variables.contents) | environment | by_the_vendor,
            folder=folder,
        )
        self._schedule()
        return sandbox

    def _schedule(self) -> None:
        """Start the sandboxes for which there is room, oldest first."""
        for sandbox in self.sandboxes.values():
            if not sandbox.is_scheduled and not sandbox.result and self._has_room(sandbox):
                sandbox.start(self._bin_folder)

    def _has_room(self, sandbox: Sandbox) -> bool:
        others = (other for other in self.sandboxes.values() if other.is_scheduled and not other.result)
        return self.capacity is None or sum(other.gpus for other in others) + sandbox.gpus <= self.capacity

    async def _wait(self, sandbox: Sandbox, timeout_s: float) -> api_pb2.SandboxWaitResponse:
        until = time.monotonic() + timeout_s
        while sandbox.result is None and await sandbox.news(until):
            pass
        self.find(sandbox.sandbox_id)  # the sandbox may have been removed meanwhile
        return api_pb2.SandboxWaitResponse(result=sandbox.result, metadata=described(sandbox))

    async def _terminate(self, sandbox: Sandbox) -> api_pb2.SandboxTerminateResponse:
        existing = sandbox.result
        await sandbox.end(api_pb2.GenericResult(status=TERMINATED))
        return api_pb2.SandboxTerminateResponse(existing_result=existing)

    async def _task_id(self, sandbox: Sandbox) -> api_pb2.SandboxGetTaskIdResponse:
        self._schedule()
        if sandbox.is_scheduled:
            return api_pb2.SandboxGetTaskIdResponse(task_id=sandbox.task_id)
        return api_pb2.SandboxGetTaskIdResponse(task_result=sandbox.result)

    def _from_name(self, request: Any, *, is_v2: bool) -> api_pb2.SandboxGetFromNameResponse:
        app_id = self._account.app_id(request.environment_name, request.app_name)
        named = [
            sandbox
            for sandbox in self.sandboxes.values()
            if sandbox.is_v2 == is_v2 and sandbox.app_id == app_id and sandbox.name == request.sandbox_name
        ]
        running = [sandbox for sandbox in named if not sandbox.result]
        found = running or (named if request.include_terminated else [])
        if not found:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox with name {request.sandbox_name!r} not found")
        return api_pb2.SandboxGetFromNameResponse(sandbox_id=found[-1].sandbox_id, metadata=described(found[-1]))

    async def close(self) -> None:
        """End all sandboxes, and wait until their processes are gone."""
        for sandbox in self.sandboxes.values():
            await sandbox.end(api_pb2.GenericResult(status=TERMINATED))
        await asyncio.gather(*(sandbox.gone() for sandbox in self.sandboxes.values()))


def described(sandbox: Sandbox) -> api_pb2.SandboxHandleMetadata:
    return api_pb2.SandboxHandleMetadata(app_id=sandbox.app_id, result=sandbox.result)


def tags(sandbox: Sandbox) -> api_pb2.SandboxTagsGetResponse:
    return api_pb2.SandboxTagsGetResponse(
        tags=[api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in sandbox.tags.items()]
    )
