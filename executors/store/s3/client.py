"""Makes the boto3 client of a bucket, finds the credentials for other machines, and checks the bucket's settings."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from executors.errors import MissingDependencyError, install_command
from executors.store.s3.address import S3Address
from executors.store.s3.errors import explain, failures, is_request_failure, status_of

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 60
ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")  # the archives, from which an object must be restored before it can be read
Problem = tuple[str, str, str]
"""The name of a setting, the problem with it, and an advice."""


def connect(
    address: S3Address, n_connections: int, read_timeout_s: float = READ_TIMEOUT_S
) -> tuple[Any, tuple[str, ...]]:
    """Return a boto3 client, and the parts of its credentials, which no message may show.

    Args:
        address: the address of the bucket.
        n_connections: the largest number of connections.
        read_timeout_s: how long the server may be silent, in seconds. Default 60.

    Raises:
        MissingDependencyError: boto3 is not installed.
        StoreError: the profile is unknown, its credentials are not available, or the endpoint is not a url.

    Example:
        client, secrets = connect(S3Address.parse("s3://bucket/runs"), 8)
    """
    try:
        from botocore.config import Config

        # botocore and not boto3, because the import of boto3 takes longer than a request
        from botocore.session import Session
    except ImportError as error:
        raise MissingDependencyError(
            f"Store {address.url!r} needs boto3. Install it with: {install_command('s3')}"
        ) from error

    def client(addressing_style: str) -> Any:
        config = Config(
            # boto3 must not repeat requests, because our `retried` repeats and counts them
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=n_connections,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=read_timeout_s,
            tcp_keepalive=True,
            # `S3Store.checks_uploads` depends on signed bodies, so a profile on this machine must not disable them.
            s3={"addressing_style": addressing_style, "payload_signing_enabled": True},
            # By default boto3 adds trailing checksums, which some servers cannot parse. They are not needed: requests
            # are signed with the SHA-256 of their bodies, and objects have digests in their content.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        made = session.create_client("s3", address.region, endpoint_url=address.endpoint_url, config=config)
        made.meta.events.register_last("before-call.s3", _send_small_bodies_at_once)
        return made

    try:
        session = _with_descriptions(Session(profile=address.profile))
        found = client("auto" if address.endpoint_url is None else "path")
        if address.endpoint_url is None and not _is_aws(found):  # from AWS_ENDPOINT_URL or a profile
            found = client("path")
        return found, tuple(value for value in _credentials(session).values() if value)
    except Exception as error:
        if not is_request_failure(error) and not isinstance(error, ValueError):  # ValueError: the endpoint is not a url
            raise
        raise explain(error, address, None, "use") from error


def located(address: S3Address) -> S3Address:
    """Return an address with the endpoint and the region that this machine's variables and profiles set.

    No request is made, and no credentials are needed. A value that is not set stays as it is.

    Args:
        address: the address of the bucket.

    Example:
        located(S3Address.parse("s3://bucket/runs")).region
    """
    try:
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.session import Session

        session = _with_descriptions(Session(profile=address.profile))
        config = Config(signature_version=UNSIGNED)
        client = session.create_client("s3", address.region, endpoint_url=address.endpoint_url, config=config)
    except ImportError:
        return address
    except failures(ValueError):  # `connect` raises this error later
        return address
    endpoint_url = None if _is_aws(client) else client.meta.endpoint_url
    return replace(
        address,
        region=address.region or session.get_config_variable("region"),
        endpoint_url=address.endpoint_url or endpoint_url,
    )


def _with_descriptions(session: Any) -> Any:
    session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    return session


@functools.cache
def _descriptions(data_path: str | None) -> Any:
    """Return the data that botocore would read from files for each client. Forked processes have it already."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


def bucket_access(address: S3Address, client: Any) -> tuple[str, dict[str, str]]:
    """Return a url and environment variables with which another machine can reach a bucket.

    The url names no profile, because profiles are in files of this machine. The variables have the credentials.

    Args:
        address: the address of the bucket.
        client: the client that `connect` made for the address. It knows the endpoint and the region.

    Raises:
        NoCredentialsError: boto3 finds no credentials on this machine. This is an error of botocore.

    Example:
        url, variables = bucket_access(address, client)
    """
    from botocore.exceptions import NoCredentialsError
    from botocore.session import Session

    credentials = _credentials(Session(profile=address.profile))
    if not credentials:
        raise NoCredentialsError
    there = replace(
        address,
        profile=None,
        region=address.region or client.meta.region_name,
        endpoint_url=address.endpoint_url or (None if _is_aws(client) else client.meta.endpoint_url),
    )
    return there.url, {name: value for name, value in credentials.items() if value}


def risky_settings(client: Any, address: S3Address) -> Iterator[Problem]:
    """Yield the settings of a bucket that would harm a run. A setting that may not or cannot be read is skipped.

    Args:
        client: the client that `connect` made for the address.
        address: the address of the bucket.

    Example:
        for name, problem, advice in risky_settings(client, address):
            print(name, problem, advice)
    """
    bucket = {"Bucket": address.bucket}
    refused = client.exceptions.ClientError
    try:
        client.list_objects_v2(**bucket, Prefix=address.prefix, MaxKeys=1)
    except refused as error:
        if status_of(error) == 403:
            advice = "Allow s3:ListBucket. Without it the server answers that a missing key is forbidden, and runs end."
            yield "listing", "the credentials may not list the bucket", advice
    with contextlib.suppress(refused):
        if client.get_bucket_versioning(**bucket).get("Status") == "Enabled":
            advice = "Suspend it, or let old versions expire. Otherwise you pay for the contributions of every round."
            yield "versioning", "on, so deleted objects stay", advice
    with contextlib.suppress(refused):
        for rule in client.get_bucket_lifecycle_configuration(**bucket).get("Rules", ()):
            scope = rule.get("Filter", {})
            scope = {**scope, **scope.get("And", {})}
            covered = str(rule.get("Prefix") or scope.get("Prefix") or "")
            is_here = address.prefix.startswith(covered) or covered.startswith(address.prefix)
            # a rule for tagged objects never applies, because no object has tags
            if not is_here or rule.get("Status") != "Enabled" or {"Tag", "Tags"} & scope.keys():
                continue
            name = rule.get("ID") or "without a name"
            advice = "Exempt the prefix. A run can be resumed only as long as its seals can be read."
            # without one of these, a rule only removes delete markers
            if {"Days", "Date"} & rule.get("Expiration", {}).keys():
                yield "lifecycle", f"rule {name!r} lets objects here expire", advice
            if any(each.get("StorageClass") in ARCHIVES for each in rule.get("Transitions", ())):
                yield "lifecycle", f"rule {name!r} moves objects here to an archive", advice


def _send_small_bodies_at_once(params: dict[str, Any], **_: Any) -> None:
    """Remove the header `Expect: 100-continue` from a small write, because the extra round trip doubles its time."""
    if isinstance(params["body"], (bytes, io.BytesIO)):
        params["headers"].pop("Expect", None)


def _is_aws(client: Any) -> bool:
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))


def _credentials(session: Any) -> dict[str, str | None]:
    """Return the credentials by the names of the variables in which boto3 looks for them. Empty if there are none."""
    credentials = session.get_credentials()
    if credentials is None:
        return {}
    key, secret, token, *_ = credentials.get_frozen_credentials()
    return {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_SESSION_TOKEN": token}
