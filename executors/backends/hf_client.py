"""Calls of `huggingface_hub` with a time limit, its errors translated, and no pauses of its own.

Release 1 asks through httpx, release 2 through httpx2; both let that library's errors through.
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

if TYPE_CHECKING:
    import huggingface_hub as hub
    import huggingface_hub.errors as hub_errors
else:
    NEEDED = "Backend 'hf' needs the Hugging Face Hub client. Install it with: pip install 'serverless-replicas[hf]'"
    hub, hub_errors = LazyModule("huggingface_hub", NEEDED), LazyModule("huggingface_hub.errors", NEEDED)
utils: Any = LazyModule("huggingface_hub.utils", "")
constants: Any = LazyModule("huggingface_hub.constants", "")

__all__ = [
    "ask",
    "check_version",
    "constants",
    "hub",
    "hub_errors",
    "list_jobs",
    "log_stream",
    "translated_errors",
    "volume_of",
]
OLDEST = (1, 20)  # the first release whose jobs have all that is asked for here
CALL_LIMIT_S = 60.0  # the SDK itself waits for an answer without end
TOKEN_ADVICE = "Log in with: hf auth login (or set HF_TOKEN to a token that may write jobs)."

T = TypeVar("T")


def check_version() -> None:
    """Refuse a client that is too old.

    Raises:
        MissingDependencyError: it is, or there is none.
    """
    found = hub.__version__
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST:
        raise MissingDependencyError(
            f"Backend 'hf' needs huggingface_hub {'.'.join(map(str, OLDEST))} or later, this is {found}. Update it "
            "with: pip install -U huggingface_hub"
        )


def ask(call: Callable[[], T], *, may_have_acted: bool = False) -> T:
    """Make a request, with a time limit and its errors translated."""
    with translated_errors(may_have_acted):
        return call_with_timeout(CALL_LIMIT_S, call)


def list_jobs(endpoint: str, namespace: str, labels: Mapping[str, str]) -> list[hub.JobInfo]:
    """Return the jobs with these labels. The SDK's own `list_jobs` waits and asks again when it is refused."""
    url: str | None = f"{endpoint}/api/jobs/{namespace}"
    params: Any = [("label", f"{name}={value}") for name, value in labels.items()]
    found: list[hub.JobInfo] = []
    while url is not None:
        headers = utils.build_hf_headers()
        response = utils.get_session().get(url, params=params, headers=headers, timeout=CALL_LIMIT_S)
        utils.hf_raise_for_status(response)
        found += [hub.JobInfo(**job, endpoint=endpoint) for job in response.json()]
        url, params = response.links.get("next", {}).get("url"), None  # which holds the labels already
    return found


def volume_of(source: str, path: str) -> hub.Volume:
    """Return a volume for a job: `hf://datasets/NAMESPACE/NAME` at a path.

    Raises:
        ValueError: it is not one.
    """
    mount = utils.parse_hf_mount(f"{source}:{path}")
    place = {"revision": mount.source.revision, "path": mount.source.path_in_repo or None}
    kind, read_only = mount.source.type, mount.read_only
    return hub.Volume(type=kind, source=mount.source.id, mount_path=mount.mount_path, read_only=read_only, **place)


@contextlib.contextmanager
def log_stream(endpoint: str, namespace: str, job_id: str, n_lines: int) -> Iterator[Any]:
    """Open a stream of a job's log, from its last lines on; None when there is no such job.

    The SDK's own reader ends after 5 s of silence, or cannot be stopped; and all streams share its 100 connections.
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
    """Return a client for streams that stay open; the service sends something every 30 s."""
    client = type(utils.get_session())
    limits = _http().Limits(max_connections=None, max_keepalive_connections=0)
    return client(limits=limits, timeout=CALL_LIMIT_S, follow_redirects=True)


def _http() -> Any:
    """Return the library that the SDK asks with: httpx or httpx2."""
    return sys.modules[type(utils.get_session()).__module__.partition(".")[0]]


@contextlib.contextmanager
def translated_errors(may_have_acted: bool = False) -> Iterator[None]:
    """Turn what the SDK raises into JobServiceError. `JobNotFoundError` passes where the Hub itself answered.

    Args:
        may_have_acted: whether the service may have done what was asked when its answer is lost.
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
        said = str(error.server_message or str(error).strip().partition("\n")[0]).rstrip(".")
        text = f"Hugging Face: {said} (HTTP {status})."
        if status in (408, 429) or status >= 500:
            kind: Kind = lost if status >= 500 else "unavailable"
            raise JobServiceError(text, kind, retry_after_s=_pause_s(error.response.headers)) from error
        advice = f" {TOKEN_ADVICE}" if status in (401, 403) else ""
        raise JobServiceError(f"{text}{advice}", "rejected") from error
    except (http.InvalidURL, http.UnsupportedProtocol) as error:
        why = str(error).rstrip(".")
        raise JobServiceError(f"Hugging Face cannot be reached: {why}. Look at HF_ENDPOINT.", "rejected") from error
    except (OSError, http.HTTPError) as error:
        was_sent = not isinstance(error, (http.ConnectError, http.ConnectTimeout))
        text = f"Hugging Face cannot be reached: {error or type(error).__name__}"
        raise JobServiceError(text, lost if was_sent else "unavailable") from error
    except UnicodeEncodeError:  # of a header, whose value must not be shown
        text = f"The Hugging Face token holds a letter that no token has. {TOKEN_ADVICE}"
        raise JobServiceError(text, "rejected") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # the SDK reads a malformed answer
        text = f"Hugging Face sent a malformed answer ({type(error).__name__}: {error}). Is there a proxy in between?"
        raise JobServiceError(text, lost) from error


def _pause_s(headers: Mapping[str, str]) -> float:
    """Return how long the service wants to be left alone: the rest of its window, else the value of `Retry-After`.

    Every answer tells of the window: it is the reason only where nothing is left of it.
    """
    window = utils.parse_ratelimit_headers(headers)
    if window and window.remaining == 0:
        return float(window.reset_in_seconds)
    seconds = headers.get("Retry-After", "")  # or a date, which is not looked at
    return float(seconds) if seconds.isdecimal() else 0.0
