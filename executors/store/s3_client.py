"""The boto3 client of an S3 store: the only place that knows how one is set up."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from executors.errors import MissingDependencyError
from executors.store.s3_address import S3Address
from executors.store.s3_errors import explain, failures

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 60


def connect(address: S3Address, n_connections: int) -> tuple[Any, tuple[str, ...]]:
    """Make a client; return it, and what must never be seen of its credentials.

    Raises:
        MissingDependencyError: boto3 is not installed.
        StoreError: the profile is unknown, or the endpoint no url.
    """
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise MissingDependencyError(
            f"Store {address.url!r} needs boto3. Install it with: pip install 'serverless-replicas[s3]'"
        ) from error

    def client(addressing_style: str) -> Any:
        config = Config(
            retries={"mode": "standard", "total_max_attempts": 1},  # `retried` does it, and so knows of it
            max_pool_connections=n_connections,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            tcp_keepalive=True,
            s3={"addressing_style": addressing_style},
            # The trailing checksums that boto3 adds by itself break servers that do not parse them. What is sent is
            # signed with its SHA-256 instead, and what is read carries digests of its own.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        made = session.client("s3", endpoint_url=address.endpoint_url, config=config)
        made.meta.events.register_last("before-call.s3", _send_small_bodies_at_once)
        return made

    try:
        session = boto3.Session(profile_name=address.profile, region_name=address.region)
        if address.endpoint_url is not None:
            return client("path"), _secrets_of(session)
        found = client("auto")  # the endpoint may still come from AWS_ENDPOINT_URL or a profile
        return found if _is_aws(found.meta.endpoint_url) else client("path"), _secrets_of(session)
    except failures() as error:
        raise explain(error, address, None, "use") from error


def elsewhere(address: S3Address) -> tuple[str, dict[str, str]]:
    """Return the url and the credentials with which another machine reaches the same bucket."""
    import boto3

    session = boto3.Session(profile_name=address.profile, region_name=address.region)
    client = session.client("s3", endpoint_url=address.endpoint_url)
    found = client.meta.endpoint_url
    there = replace(
        address,
        profile=None,
        region=address.region or client.meta.region_name,
        endpoint_url=address.endpoint_url or (None if _is_aws(found) else found),
    )
    credentials = session.get_credentials()
    if credentials is None:
        from botocore.exceptions import NoCredentialsError

        raise NoCredentialsError
    frozen = credentials.get_frozen_credentials()
    named = {
        "AWS_ACCESS_KEY_ID": frozen.access_key,
        "AWS_SECRET_ACCESS_KEY": frozen.secret_key,
        "AWS_SESSION_TOKEN": frozen.token,
    }
    return there.url, {name: value for name, value in named.items() if value}


def _send_small_bodies_at_once(params: dict[str, Any], **_: Any) -> None:
    """Do not ask before sending a body that arrives as bytes: it would double the time of every small write."""
    if isinstance(params["body"], (bytes, io.BytesIO)):
        params["headers"].pop("Expect", None)


def _is_aws(endpoint_url: str) -> bool:
    host = urlsplit(endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))


def _secrets_of(session: Any) -> tuple[str, ...]:
    credentials = session.get_credentials()
    if credentials is None:
        return ()
    frozen = credentials.get_frozen_credentials()
    return tuple(value for value in (frozen.secret_key, frozen.token, frozen.access_key) if value)
