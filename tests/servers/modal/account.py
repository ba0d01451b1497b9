"""The objects of a Modal account other than sandboxes: apps, images, secrets and volumes."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2

ENVIRONMENT = "main"
IMAGE_BUILDER_VERSION = "2025.06"
SUCCESS = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_id(prefix: str, length: int = 22) -> str:
    return f"{prefix}-" + "".join(secrets.choice(BASE62) for _ in range(length))


def token(**claims: object) -> str:
    """Return a text in the form of a JWT that expires in an hour. No process checks its signature."""

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return ".".join((part({"alg": "none"}), part({"exp": time.time() + 3600, **claims}), part(secrets.token_hex(8))))


class Account:
    """Answers the calls about everything that is not a sandbox."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, str]] = {}
        """Named secrets, which users create in the vendor's dashboard: name -> variables."""
        self.builder_says: list[str] = []
        """The output of building an image. If it is empty, every image exists already."""
        self.builder_is_slow = False
        self.rates = {
            "cpu_hour_cost_sandbox": "0.1419",
            "mem_gib_hour_cost_sandbox": "0.024",
            "gpu_hour_cost_h100": "3.95",
            "gpu_hour_cost_a100_40gb": "2.10",
            "volume_gib_month_cost": "0.09",
        }
        """The workspace's prices for an hour, by the vendor's names."""
        self.volumes: set[str] = set()
        """Names of volumes."""
        self.auth_tokens: set[str] = set()
        self.apps: dict[str, tuple[str, str]] = {}
        """App id -> environment and name."""
        self._secret_ids: dict[str, str | dict[str, str]] = {}
        self._images: dict[bytes, str] = {}

    # Called by the code for sandboxes

    def variables_of(self, secret_id: str) -> Mapping[str, str]:
        secret = self._secret_ids.get(secret_id)
        if secret is None:
            raise GRPCError(Status.NOT_FOUND, f"Secret {secret_id} not found")
        return self.secrets[secret] if isinstance(secret, str) else secret

    def app_id(self, environment: str, name: str) -> str | None:
        return next((app_id for app_id, app in self.apps.items() if app == (environment, name)), None)

    # Calls

    async def WorkspaceNameLookup(self, request: Any, metadata: Any) -> api_pb2.WorkspaceNameLookupResponse:
        return api_pb2.WorkspaceNameLookupResponse(username="ada")

    async def WorkspaceBillingRates(self, request: Any, metadata: Any) -> api_pb2.WorkspaceBillingRatesResponse:
        return api_pb2.WorkspaceBillingRatesResponse(rates=self.rates)

    async def AuthTokenGet(self, request: Any, metadata: Any) -> api_pb2.AuthTokenGetResponse:
        fresh = token()
        self.auth_tokens.add(fresh)
        return api_pb2.AuthTokenGetResponse(token=fresh)

    async def EnvironmentGetOrCreate(self, request: Any, metadata: Any) -> api_pb2.EnvironmentGetOrCreateResponse:
        name = self._environment(request.deployment_name)
        settings = api_pb2.EnvironmentSettings(image_builder_version=IMAGE_BUILDER_VERSION)
        return api_pb2.EnvironmentGetOrCreateResponse(
            environment_id=f"en-{name:0>22}", metadata=api_pb2.EnvironmentMetadata(name=name, settings=settings)
        )

    async def AppGetOrCreate(self, request: Any, metadata: Any) -> api_pb2.AppGetOrCreateResponse:
        app = (self._environment(request.environment_name), request.app_name)
        app_id = request.app_name if request.app_name in self.apps else self.app_id(*app)
        if app_id is None:
            if request.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise GRPCError(Status.NOT_FOUND, f"App {app[1]!r} not found in environment {app[0]!r}")
            app_id = new_id("ap")
            self.apps[app_id] = app
        environment, name = self.apps[app_id]
        return api_pb2.AppGetOrCreateResponse(
            app_id=app_id,
            handle_metadata=api_pb2.AppHandleMetadata(app_id=app_id, description=name, environment_name=environment),
        )

    async def ImageGetOrCreate(self, request: Any, metadata: Any) -> api_pb2.ImageGetOrCreateResponse:
        """Return an image. It is built already, unless the builder has output. All images use the same interpreter."""
        definition = request.image.SerializeToString(deterministic=True)
        is_built = definition in self._images or not self.builder_says
        image_id = self._images.setdefault(definition, new_id("im"))
        return api_pb2.ImageGetOrCreateResponse(
            image_id=image_id,
            result=api_pb2.GenericResult(status=SUCCESS) if is_built else None,
            metadata=api_pb2.ImageMetadata(image_builder_version=request.builder_version),
        )

    async def VolumeGetOrCreate(self, request: Any, metadata: Any) -> api_pb2.VolumeGetOrCreateResponse:
        """Look a volume up. A test makes one with `server.account.volumes.add(name)`."""
        name = request.deployment_name
        environment = self._environment(request.environment_name)
        if name not in self.volumes:
            raise GRPCError(Status.NOT_FOUND, f"Volume {name!r} not found in environment {environment!r}")
        return api_pb2.VolumeGetOrCreateResponse(
            volume_id=f"vo-{name:0>22}", metadata=api_pb2.VolumeMetadata(name=name)
        )

    async def ImageJoinStreaming(self, request: Any, metadata: Any) -> api_pb2.ImageJoinStreamingResponse:
        """Send the output of the builder, and its end, in one message of a stream."""
        while self.builder_is_slow:
            await asyncio.sleep(0.01)
        return api_pb2.ImageJoinStreamingResponse(
            result=api_pb2.GenericResult(status=SUCCESS),
            task_logs=[api_pb2.TaskLogs(data=f"{line}\n") for line in self.builder_says],
            entry_id="1",
            eof=True,
        )

    async def SecretGetOrCreate(self, request: Any, metadata: Any) -> api_pb2.SecretGetOrCreateResponse:
        """Look a named secret up, or keep the variables of one without a name."""
        name = request.deployment_name
        environment = self._environment(request.environment_name)
        if name and request.object_creation_type:
            raise GRPCError(Status.UNIMPLEMENTED, "Named secrets are made by the test: server.secrets[name] = {…}")
        if name and name not in self.secrets:
            raise GRPCError(Status.NOT_FOUND, f"Secret {name!r} not found in environment {environment!r}")
        variables = self.secrets[name] if name else dict(request.env_dict)
        if refused := [key for key in variables if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", key)]:
            raise GRPCError(Status.INVALID_ARGUMENT, f"Secret key name {refused[0]!r} is invalid")
        if missing := [key for key in request.required_keys if key not in variables]:
            raise GRPCError(Status.NOT_FOUND, f"Secret {name!r} is missing key(s): {', '.join(missing)}")
        secret_id = new_id("st")
        self._secret_ids[secret_id] = name or variables
        described = api_pb2.SecretMetadata(name=name, keys=sorted(variables), environment_name=environment)
        return api_pb2.SecretGetOrCreateResponse(secret_id=secret_id, metadata=described)

    def _environment(self, name: str) -> str:
        if name not in ("", ENVIRONMENT):
            raise GRPCError(Status.NOT_FOUND, f"Environment {name!r} not found")
        return ENVIRONMENT
