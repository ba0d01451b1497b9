"""Errors of an S3 server or of boto3: decides whether to repeat a request, and explains the error to the user."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from executors.errors import KeyNotFoundError, StoreError, UnwritableStoreError
from executors.masking import mask_values
from executors.store.s3.address import S3Address

T = TypeVar("T")

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0

# Errors that soon pass although their status is not 5xx. ConditionalRequestConflict: another process is creating the
# key at this moment.
PASSING_CODES = {
    "ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown", "Throttling",
    "ThrottlingException", "TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded",
    "RequestTimeTooSkewed",  # the clock of a machine that just woke up is corrected within seconds
}  # fmt: skip
PASSING_STATUSES = {408, 409, 429, 500, 502, 503, 504}

# These errors end any request: a replica's credentials never change, so they do not become valid again.
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
    "EntityTooLarge": "Write it as several objects.",
    "InvalidObjectState": "The object was moved to an archive by a lifecycle rule. Restore it, and exempt the prefix.",
    # Errors of botocore, by class:
    "NoCredentialsError": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or add ?profile=NAME to the URL.",
    "PartialCredentialsError": "Set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
    "ProfileNotFound": "Correct ?profile=, or add the profile to ~/.aws/config.",
    "SSLError": "If the server has a certificate of your own, name its authority in AWS_CA_BUNDLE.",
    "ConnectTimeoutError": "Check endpoint_url and that the network lets this machine reach it.",
    "EndpointConnectionError": "Check endpoint_url (its host and port) and that the server runs.",
    "InvalidRegionError": "Correct ?region=, or AWS_DEFAULT_REGION.",
}
FULL = ("QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull")  # the codes of Ceph and of MinIO
FULL_STATUS = 507
FULL_ADVICE = "The bucket is full. Delete old runs (`replicas rm`), or ask for a larger quota."
CREDENTIALS = "Check the credential_process, the login or the role that provides them, and this machine's clock."
ENDPOINT = "Correct ?endpoint_url=, or AWS_ENDPOINT_URL: it is a url such as https://s3.example.com."
REFUSED = (401, 403)
WRITING = ("create", "write")
NEEDED_PERMISSIONS = {"read": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"}

_dice = random.SystemRandom()  # not the global generator, because the user may have seeded it


class TornReplyError(Exception):
    """A reply ended early, or its parts belong to different objects."""


def code_of(error: BaseException) -> str:
    """Return the S3 code of an error that the server sent, such as "NoSuchKey". For a HEAD it is the HTTP status.

    Args:
        error: any error. The code is "" if the server did not send the error.

    Example:
        code_of(error) == "NoSuchBucket"
    """
    return str(_response(error).get("Error", {}).get("Code", ""))


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error that the server sent.

    Args:
        error: any error. The status is 0 if the server did not send the error.

    Example:
        status_of(error) == 404
    """
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _response(error: BaseException) -> dict[str, Any]:
    return getattr(error, "response", None) or {}  # None: the server sent no answer


def failures(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the classes of errors that a request to a bucket may raise, to be used in `except`.

    Args:
        more: more classes.

    Example:
        except failures(ValueError): ...
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    return (ClientError, BotoCoreError, ResponseParserError, TornReplyError, *more)


def is_request_failure(error: Exception) -> bool:
    """Return True if an error comes from a request to a bucket, or from a program that provides the credentials.

    Args:
        error: any error. A program that provides credentials may raise an error of any class.

    Example:
        is_request_failure(error)
    """
    return isinstance(error, failures()) or is_of_credentials(error)


def is_of_credentials(error: BaseException) -> bool:
    """Return True if boto3 raised an error while it got credentials from a program, a login or a role.

    Args:
        error: any error.

    Example:
        is_of_credentials(error)
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "botocore.credentials" for frame in frames)


def will_pass(error: BaseException) -> bool:
    """Return True if the same request may succeed a little later.

    Args:
        error: the error of the request.

    Example:
        will_pass(error)
    """
    import botocore.exceptions as raised
    from botocore.parsers import ResponseParserError

    if isinstance(error, raised.ClientError):
        return code_of(error) in PASSING_CODES or status_of(error) in PASSING_STATUSES
    if isinstance(error, raised.SSLError):
        return "CERTIFICATE" not in str(error).upper()
    passing = (
        TornReplyError,
        ResponseParserError,  # boto3 raises this error for a listing that was cut off
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
    """Repeat a request until it succeeds, its error is permanent, or the time has passed. Return its result.

    The pauses are random and become longer (exponential backoff with full jitter, as AWS recommends).

    Args:
        act: makes the request.
        deadline_s: for how many seconds after its first failure the request is repeated. The time before the first
            failure does not count, because a large object may take long to send. 0: the request is tried once.
        sleep: waits for the given number of seconds.
        clock: returns seconds of a monotonic clock.
        failed: is called with each error after which the request is repeated. Default: nothing is called.

    Raises:
        Exception: the last error of `act`.

    Example:
        retried(lambda: client.head_object(**name), deadline_s=60.0, sleep=time.sleep, clock=time.monotonic)
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
    """Return a StoreError for an error of a request. Its message has the cause, the object and an advice.

    Args:
        error: the error of the request.
        address: the address of the bucket.
        key: the key of the object. None: the request was not about one object.
        verb: the action that failed, for the message, such as "read" or "create".
        secrets: parts of the credentials, which the message must not have. Default: none.

    Example:
        raise explain(error, address, "otter/run.json", "read", secrets) from error
    """
    url, code, status = address.url, code_of(error), status_of(error)
    is_missing = code in ("NoSuchKey", "404") or (status == 404 and code != "NoSuchBucket")
    if key is not None and verb == "read" and is_missing:
        return KeyNotFoundError(f"No object {key!r} in {url}.", key=key, url=url)
    cause = str(error)
    if status:
        message = _response(error).get("Error", {}).get("Message")  # Ceph sends no message
        cause = f"{code}{': ' if message else ''}{(message or '').rstrip('.')} (HTTP {status})"
    cause = mask_values(cause, secrets)
    where = f"{key!r} in {url}" if key is not None else url
    hint = _advice(error, verb)
    if hint is CREDENTIALS:
        cause = f"its credentials are not available: {cause}"
    if type(error).__name__ == "NoCredentialsError":
        # The key of a probe means nothing to a user whose credentials are missing.
        explained = StoreError(f"No AWS credentials were found for {url}. {hint}", key=key, url=url)
        explained.refusal = "credentials"
        return explained
    hint = hint.format(bucket=address.bucket)
    is_refused = code in DEAD_CREDENTIALS or (verb in WRITING and (status in REFUSED or _is_full(error)))
    kind = UnwritableStoreError if is_refused else StoreError
    explained = kind(f"Cannot {verb} {where}: {cause.rstrip('.')}.{hint and ' '}{hint}", key=key, url=url)
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
        return FULL_ADVICE
    if is_of_credentials(error):
        return CREDENTIALS
    if isinstance(error, ValueError):  # botocore could not parse the endpoint
        return ENDPOINT
    if status_of(error) in REFUSED:
        hint = f"The credentials must allow {NEEDED_PERMISSIONS.get(verb, 's3:PutObject')} there."
        if verb == "read":
            hint += " Allow s3:ListBucket, too. Without it a missing key gives the same error."
        return hint
    if will_pass(error) and status_of(error):
        return "The server refused every try. Try again later, or with fewer requests at the same time."
    return ""
