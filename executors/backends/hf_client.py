"""Calls `huggingface_hub` with a time limit, and turns its errors into JobServiceError.

Release 1 of the SDK uses httpx, and release 2 httpx2. Both raise errors of that library.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from executors.backends.jobs.sdk import LazyModule, call_with_timeout
from executors.backends.jobs.service import JobServiceError, Kind
from executors.errors import MissingDependencyError

NEEDED_BY = "Backend 'hf' needs the Hugging Face Hub client."
if TYPE_CHECKING:
    import huggingface_hub as hub
    import huggingface_hub.errors as hub_errors
else:
    hub = LazyModule("huggingface_hub", NEEDED_BY, "hf")
    hub_errors = LazyModule("huggingface_hub.errors", NEEDED_BY, "hf")
utils: Any = LazyModule("huggingface_hub.utils", NEEDED_BY, "hf")
constants: Any = LazyModule("huggingface_hub.constants", NEEDED_BY, "hf")

__all__ = [
    "check_version",
    "constants",
    "hub",
    "hub_errors",
    "hub_volume",
    "list_hub_jobs",
    "log_stream",
    "request_hub",
    "translated_errors",
]
OLDEST = (1, 20)  # the first release that has all functions that are used here
CALL_LIMIT_S = 60.0  # without it, the SDK would wait for an answer for ever
TOKEN_ADVICE = "Log in with: hf auth login (or set HF_TOKEN to a token that may write jobs)."

T = TypeVar("T")


def check_version() -> None:
    """Refuse an SDK that is too old.

    Raises:
        MissingDependencyError: the SDK is too old or not installed.

    Example:
        check_version()
    """
    found = hub.__version__
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST:
        raise MissingDependencyError(
            f"Backend 'hf' needs huggingface_hub {'.'.join(map(str, OLDEST))} or later; this is {found}. Update it "
            "with: pip install -U huggingface_hub"
        )


def request_hub(call: Callable[[], T], *, may_have_acted: bool = False) -> T:
    """Make a request with a time limit, and return its result.

    Args:
        call: makes the request with the SDK.
        may_have_acted: True if the service may have acted when its answer is lost. Default False.

    Raises:
        JobServiceError: the request failed.
        JobNotFoundError: the Hub does not know the job. This is an error of the SDK.

    Example:
        request_hub(api.whoami)
    """
    with translated_errors(may_have_acted):
        return call_with_timeout(CALL_LIMIT_S, call)


def list_hub_jobs(endpoint: str, namespace: str, labels: Mapping[str, str]) -> list[hub.JobInfo]:
    """Return the jobs with these labels.

    The SDK's own `list_jobs` waits and repeats a refused request, so the caller could not decide about pauses.

    Args:
        endpoint: the url of the Hub.
        namespace: the user or organization that has the jobs.
        labels: the labels.

    Example:
        list_hub_jobs("https://huggingface.co", "me", {"replicas-run": "brave-otter-7f3a"})
    """
    url: str | None = f"{endpoint}/api/jobs/{namespace}"
    params: Any = [("label", f"{name}={value}") for name, value in labels.items()]
    found: list[hub.JobInfo] = []
    while url is not None:
        headers = utils.build_hf_headers()
        response = utils.get_session().get(url, params=params, headers=headers, timeout=CALL_LIMIT_S)
        utils.hf_raise_for_status(response)
        found += [hub.JobInfo(**job, endpoint=endpoint) for job in response.json()]
        url, params = response.links.get("next", {}).get("url"), None  # the url of the next page has the labels
    return found


def hub_volume(source: str, path: str) -> hub.Volume:
    """Return a volume for a job.

    Args:
        source: the storage, as in "hf://datasets/NAMESPACE/NAME".
        path: the path at which the job sees it.

    Raises:
        ValueError: the source is not a url of the Hub, or the path is not absolute.

    Example:
        hub_volume("hf://datasets/me/text", "/data")
    """
    mount = utils.parse_hf_mount(f"{source}:{path}")
    place = {"revision": mount.source.revision, "path": mount.source.path_in_repo or None}
    kind, read_only = mount.source.type, mount.read_only
    return hub.Volume(type=kind, source=mount.source.id, mount_path=mount.mount_path, read_only=read_only, **place)


@contextlib.contextmanager
def log_stream(endpoint: str, namespace: str, job_id: str, n_lines: int) -> Iterator[Any]:
    """Open a stream of a job's log that begins with its last lines. The value is None if there is no such job.

    The SDK's own reader ends after 5 s of silence, or cannot be stopped. All its streams share 100 connections.

    Args:
        endpoint: the url of the Hub.
        namespace: the user or organization that has the job.
        job_id: the id of the job.
        n_lines: the number of last lines.

    Raises:
        JobServiceError: the stream cannot be opened.

    Example:
        with log_stream("https://huggingface.co", "me", "687f", 100) as response:
            ...
    """
    url, headers = f"{endpoint}/api/jobs/{namespace}/{job_id}/logs", utils.build_hf_headers()
    with translated_errors():
        try:
            with _streams().stream("GET", url, params={"tail": n_lines}, headers=headers) as response:
                utils.hf_raise_for_status(response)
                yield response
        except hub_errors.JobNotFoundError:
            yield None


@functools.cache
def _streams() -> Any:
    """Return a client for streams that stay open. Its time limit works because the service sends data every 30 s."""
    client = type(utils.get_session())
    limits = _http().Limits(max_connections=None, max_keepalive_connections=0)
    return client(limits=limits, timeout=CALL_LIMIT_S, follow_redirects=True)


def _http() -> Any:
    """Return the HTTP library of the SDK: httpx or httpx2."""
    return sys.modules[type(utils.get_session()).__module__.partition(".")[0]]


@contextlib.contextmanager
def translated_errors(may_have_acted: bool = False) -> Iterator[None]:
    """Turn errors of the SDK into JobServiceError. A `JobNotFoundError` of the Hub itself is passed on unchanged.

    Args:
        may_have_acted: True if the service may have acted when its answer is lost. Default False.

    Raises:
        JobServiceError: the block raised an error of the SDK.

    Example:
        with translated_errors():
            api.whoami()
    """
    http = _http()
    lost: Kind = "unknown" if may_have_acted else "unavailable"
    try:
        yield
    except hub_errors.JobNotFoundError as error:
        if "json" in error.response.headers.get("Content-Type", "").lower():
            raise
        text = "Hugging Face: HTTP 404, and not from the Hub. Is there a proxy in between?"
        raise JobServiceError(text, "unavailable") from error
    except hub_errors.LocalTokenNotFoundError as error:
        raise JobServiceError(f"Backend 'hf' needs a Hugging Face token. {TOKEN_ADVICE}", "rejected") from error
    except hub_errors.HfHubHTTPError as error:
        status = error.response.status_code
        message = str(error.server_message or str(error).strip().partition("\n")[0]).rstrip(".")
        text = f"Hugging Face: {message} (HTTP {status})."
        if status in (408, 429) or status >= 500:
            kind: Kind = lost if status >= 500 else "unavailable"
            raise JobServiceError(text, kind, retry_after_s=_pause_s(error.response.headers)) from error
        advice = f" {TOKEN_ADVICE}" if status in (401, 403) else ""
        raise JobServiceError(f"{text}{advice}", "rejected") from error
    except (http.InvalidURL, http.UnsupportedProtocol) as error:
        why = str(error).rstrip(".")
        raise JobServiceError(f"Hugging Face cannot be reached: {why}. Correct HF_ENDPOINT.", "rejected") from error
    except (OSError, http.HTTPError) as error:
        was_sent = not isinstance(error, (http.ConnectError, http.ConnectTimeout))
        text = f"Hugging Face cannot be reached: {error or type(error).__name__}"
        raise JobServiceError(text, lost if was_sent else "unavailable") from error
    except UnicodeEncodeError:  # the header with the token cannot be encoded; the error would show the token
        text = f"The Hugging Face token has a character that no token can have. {TOKEN_ADVICE}"
        raise JobServiceError(text, "rejected") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # the SDK reads a malformed answer
        text = f"Hugging Face sent a malformed answer ({type(error).__name__}: {error}). Is there a proxy in between?"
        raise JobServiceError(text, lost) from error


def _pause_s(headers: Mapping[str, str]) -> float:
    """Return the pause for which the service asks: the rest of its rate-limit window, otherwise `Retry-After`.

    Every answer describes the window. But the window is only the reason for a refusal if it has no requests left.
    """
    window = utils.parse_ratelimit_headers(headers)
    if window and window.remaining == 0:
        return float(window.reset_in_seconds)
    seconds = headers.get("Retry-After", "")  # it may be a date instead, which is ignored
    return float(seconds) if seconds.isdecimal() else 0.0
