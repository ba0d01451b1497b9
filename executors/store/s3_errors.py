"""What an S3 server or client says when something fails: whether to try again, and in words that help."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from executors.errors import KeyNotFoundError, StoreError
from executors.store.s3_address import S3Address

T = TypeVar("T")

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0

# Not 5xx, and yet over soon. ConditionalRequestConflict: somebody else is creating the key right now.
PASSING_CODES = {
    "ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown", "Throttling",
    "ThrottlingException", "TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded",
}  # fmt: skip
PASSING_STATUSES = {408, 409, 429, 500, 502, 503, 504}

_dice = random.SystemRandom()  # not the global generator: a user who seeded it must find it as it was


class TornReplyError(Exception):
    """A reply ended early, or its parts belong to different objects."""


def code_of(error: BaseException) -> str:
    """Return the S3 code of an error that the server sent ("" for others); for a HEAD it is the status."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error that the server sent; 0 for others."""
    return int(getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def failures() -> tuple[type[Exception], ...]:
    """Return what a boto3 client may raise, and we with it."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    return (ClientError, BotoCoreError, ResponseParserError, TornReplyError)


def will_pass(error: BaseException) -> bool:
    """Tell whether the same request may well succeed a little later."""
    import botocore.exceptions as raised
    from botocore.parsers import ResponseParserError

    if isinstance(error, raised.ClientError):
        return code_of(error) in PASSING_CODES or status_of(error) in PASSING_STATUSES
    if isinstance(error, raised.SSLError):
        return "CERTIFICATE" not in str(error).upper()
    passing = (
        TornReplyError,
        ResponseParserError,  # a listing that was cut off
        raised.IncompleteReadError,
        raised.HTTPClientError,
        raised.ConnectionError,
    )
    return isinstance(error, passing)


def retried(
    act: Callable[[], T], *, deadline_s: float, sleep: Callable[[float], None], clock: Callable[[], float]
) -> T:
    """Act until it succeeds, fails for good, or the deadline is near; wait longer and longer, at random, in between."""
    import tenacity

    started = clock()

    def wait(state: tenacity.RetryCallState) -> float:
        return _dice.uniform(0, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**state.attempt_number))

    def stop(state: tenacity.RetryCallState) -> bool:
        return clock() + state.upcoming_sleep - started >= deadline_s

    policy = tenacity.Retrying(
        retry=tenacity.retry_if_exception(will_pass), wait=wait, stop=stop, sleep=sleep, reraise=True
    )
    return policy(act)


def explain(
    error: Exception, address: S3Address, key: str | None, verb: str, secrets: tuple[str, ...] = ()
) -> StoreError:
    """Put an error into words: what happened, where, and what to do about it; without the secrets."""
    url = address.url
    what = f"{key!r} in {url}" if key is not None else url
    if key is not None and verb == "read" and _is_missing(error):
        return KeyNotFoundError(f"No object {key!r} in {url}.", key=key, url=url)
    said = str(error)
    if status := status_of(error):
        message = getattr(error, "response", {}).get("Error", {}).get("Message")  # Ceph sends none
        said = f"{code_of(error)}{': ' if message else ''}{(message or '').rstrip('.')} (HTTP {status})"
    for secret in secrets:
        said = said.replace(secret, "***")
    hint = _advice(error, address, verb)
    return StoreError(f"Cannot {verb} {what}: {said.rstrip('.')}.{hint and ' '}{hint}", key=key, url=url)


def _is_missing(error: Exception) -> bool:
    return code_of(error) in ("NoSuchKey", "404") or (status_of(error) == 404 and code_of(error) != "NoSuchBucket")


def _advice(error: Exception, address: S3Address, verb: str) -> str:
    import botocore.exceptions as raised

    code, status = code_of(error), status_of(error)
    by_code = {
        "NoSuchBucket": f"There is no bucket {address.bucket!r} there. Create it, or correct the url.",
        "InvalidBucketName": "Correct the bucket in the url.",
        "PermanentRedirect": "The bucket is in another region; name it with ?region=.",
        "AuthorizationHeaderMalformed": "The region is probably wrong; name it with ?region=.",
        "InvalidAccessKeyId": "The server does not know this access key. Check AWS_ACCESS_KEY_ID, or ?profile=.",
        "SignatureDoesNotMatch": "The secret key does not fit the access key. Check AWS_SECRET_ACCESS_KEY.",
        "ExpiredToken": "The session token has expired. Get new credentials.",
        "RequestTimeTooSkewed": "This machine's clock is wrong. Set it, or run a time service.",
        "EntityTooLarge": "Write the object in parts, under keys of their own.",
    }
    if code in by_code:
        return by_code[code]
    if status in (401, 403):
        return _permissions(verb)
    if will_pass(error) and status:
        return "The server refused for as long as we tried. Try again later, or with fewer requests at once."
    advice: tuple[tuple[type[BaseException], str], ...] = (
        (
            raised.NoCredentialsError,
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile: ?profile=NAME.",
        ),
        (raised.PartialCredentialsError, "Set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."),
        (raised.ProfileNotFound, "Correct ?profile=, or add the profile to ~/.aws/config."),
        (raised.SSLError, "If the server has a certificate of your own, name its authority in AWS_CA_BUNDLE."),
        (raised.ConnectTimeoutError, "Check endpoint_url and that the network lets this machine reach it."),
        (raised.EndpointConnectionError, "Check endpoint_url (its host and port) and that the server runs."),
    )
    return next((text for kind, text in advice if isinstance(error, kind)), "")


def _permissions(verb: str) -> str:
    action = {"read": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"}.get(verb, "s3:PutObject")
    hint = f"The credentials must allow {action} there."
    if verb == "read":
        hint += " Allow s3:ListBucket, too: without it the server answers so for a key that is only missing."
    return hint
