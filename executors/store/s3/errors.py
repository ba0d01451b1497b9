"""Errors of an S3 server or client: whether to try again, and in words that help."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from executors.errors import KeyNotFoundError, StoreError, UnwritableStoreError
from executors.store.s3.address import S3Address

T = TypeVar("T")

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0

# Not 5xx, and yet over soon. ConditionalRequestConflict: another writer is creating the key right now.
PASSING_CODES = {
    "ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown", "Throttling",
    "ThrottlingException", "TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded",
    "RequestTimeTooSkewed",  # a clock that was just woken or set is corrected in seconds
}  # fmt: skip
PASSING_STATUSES = {408, 409, 429, 500, 502, 503, 504}

# For any request: static credentials do not become valid again, and a replica's credentials are static.
DEAD_CREDENTIALS = {
    "ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
}  # fmt: skip
EXPIRED = (
    "The session token has expired. Get new credentials. Replicas keep the credentials of their launch: `replicas "
    "resume` gives them new ones."
)

ADVICE = {
    "NoSuchBucket": "There is no bucket {bucket!r} there. Create it, or correct the url.",
    "InvalidBucketName": "Correct the bucket in the url.",
    "PermanentRedirect": "The bucket is in another region; name it with ?region=.",
    "AuthorizationHeaderMalformed": "The region is probably wrong; name it with ?region=.",
    "InvalidAccessKeyId": "The server does not know this access key. Check AWS_ACCESS_KEY_ID, or ?profile=.",
    "SignatureDoesNotMatch": "The secret key does not fit the access key. Check AWS_SECRET_ACCESS_KEY.",
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), EXPIRED),
    "RequestTimeTooSkewed": "This machine's clock is wrong. Set it, or run a time service.",
    "EntityTooLarge": "Write the object in parts, under keys of their own.",
    "InvalidObjectState": "The object was moved to an archive by a lifecycle rule. Restore it, and exempt the prefix.",
    # Errors of botocore, by class:
    "NoCredentialsError": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile: ?profile=NAME.",
    "PartialCredentialsError": "Set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
    "ProfileNotFound": "Correct ?profile=, or add the profile to ~/.aws/config.",
    "SSLError": "If the server has a certificate of your own, name its authority in AWS_CA_BUNDLE.",
    "ConnectTimeoutError": "Check endpoint_url and that the network lets this machine reach it.",
    "EndpointConnectionError": "Check endpoint_url (its host and port) and that the server runs.",
    "InvalidRegionError": "Correct ?region=, or AWS_DEFAULT_REGION.",
}
FULL = ("QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull")  # of Ceph and of MinIO
FULL_STATUS = 507
NO_ROOM = "No room is left there: delete old runs (`replicas rm`), or have the quota raised."
CREDENTIALS = "Look at the credential_process, the login or the role that gives them, and at this machine's clock."
ENDPOINT = "Correct ?endpoint_url=, or AWS_ENDPOINT_URL: it is a url such as https://s3.example.com."
REFUSED = (401, 403)
WRITING = ("create", "write")
NEEDED_PERMISSIONS = {"read": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"}

_dice = random.SystemRandom()  # not the global generator: a user who seeded it must find it as it was


class TornReplyError(Exception):
    """A reply ended early, or its parts belong to different objects."""


def code_of(error: BaseException) -> str:
    """Return the S3 code of an error that the server sent ("" for others); for a HEAD it is the status."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error that the server sent; 0 for others."""
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _response(error: BaseException) -> dict[str, Any]:
    return getattr(error, "response", None) or {}  # None: the server was silent, or hung up


def failures(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors of a boto3 client, `TornReplyError`, and more."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    return (ClientError, BotoCoreError, ResponseParserError, TornReplyError, *more)


def is_failure(error: Exception) -> bool:
    """Return whether an error is one of `failures`, or what came of getting credentials: that may be of any class."""
    return isinstance(error, failures()) or is_of_credentials(error)


def is_of_credentials(error: BaseException) -> bool:
    """Return whether an error was raised while the client got its credentials, from a program, a login or a role."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "botocore.credentials" for frame in frames)


def will_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed a little later."""
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
    act: Callable[[], T],
    *,
    deadline_s: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
    failed: Callable[[Exception], None] = lambda error: None,
) -> T:
    """Act until it succeeds or fails for good; wait longer and longer, at random, in between.

    Args:
        act: the request.
        deadline_s: how long after its first failure it is repeated: a large object may take longer to send. 0: once.
        sleep: waits between two tries, for the seconds that it is given.
        clock: returns seconds of a monotonic clock.
        failed: gets each error after which the request is repeated.
    """
    failed_at, longest_s = math.inf, FIRST_WAIT_S
    while True:
        try:
            return act()
        except Exception as error:
            failed_at = min(failed_at, clock())
            longest_s = min(LONGEST_WAIT_S, 2 * longest_s)
            wait_s = _dice.uniform(0, longest_s)
            if not will_pass(error) or clock() + wait_s - failed_at >= deadline_s:
                raise
            failed(error)
        sleep(wait_s)


def explain(
    error: Exception, address: S3Address, key: str | None, verb: str, secrets: tuple[str, ...] = ()
) -> StoreError:
    """Return an error whose message names the failure, the place and what to do, without secrets."""
    url, code, status = address.url, code_of(error), status_of(error)
    is_missing = code in ("NoSuchKey", "404") or (status == 404 and code != "NoSuchBucket")
    if key is not None and verb == "read" and is_missing:
        return KeyNotFoundError(f"No object {key!r} in {url}.", key=key, url=url)
    said = str(error)
    if status:
        message = _response(error).get("Error", {}).get("Message")  # Ceph sends none
        said = f"{code}{': ' if message else ''}{(message or '').rstrip('.')} (HTTP {status})"
    for secret in secrets:
        said = said.replace(secret, "***")
    where = f"{key!r} in {url}" if key is not None else url
    hint = _advice(error, verb)
    if hint is CREDENTIALS:
        said = f"its credentials are not available: {said}"
    hint = hint.format(bucket=address.bucket)
    is_refused = code in DEAD_CREDENTIALS or (verb in WRITING and (status in REFUSED or _is_full(error)))
    kind = UnwritableStoreError if is_refused else StoreError
    explained = kind(f"Cannot {verb} {where}: {said.rstrip('.')}.{hint and ' '}{hint}", key=key, url=url)
    if code in DEAD_CREDENTIALS:
        explained.refusal = "credentials"
    elif not will_pass(error) and not _is_full(error):
        explained.refusal = "permission"
    return explained


def _is_full(error: Exception) -> bool:
    return code_of(error) in FULL or status_of(error) == FULL_STATUS


def _advice(error: Exception, verb: str) -> str:
    for name in (code_of(error), *(each.__name__ for each in type(error).__mro__)):
        if name in ADVICE:
            return ADVICE[name]
    if _is_full(error):
        return NO_ROOM
    if is_of_credentials(error):
        return CREDENTIALS
    if isinstance(error, ValueError):  # of botocore, which takes the endpoint apart
        return ENDPOINT
    if status_of(error) in REFUSED:
        hint = f"The credentials must allow {NEEDED_PERMISSIONS.get(verb, 's3:PutObject')} there."
        if verb == "read":
            hint += " Allow s3:ListBucket, too: without it the server answers so for a key that is only missing."
        return hint
    if will_pass(error) and status_of(error):
        return "The server refused for as long as we tried. Try again later, or with fewer requests at once."
    return ""
