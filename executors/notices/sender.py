"""Sends one message to one URL: JSON by POST, or a text through the package apprise. Every send has a time limit."""

from __future__ import annotations

import base64
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from executors.notices.targets import describe_target, is_loopback, needs_apprise
from executors.store.parallel import in_parallel

REQUEST_S = 5.0
PAUSES_S = (0.5, 2.0)
"""The pauses between the tries to send a message."""
MAX_ANSWER = 4096
PERMANENT = frozenset({400, 401, 403, 404, 405, 410, 413, 422})
"""Status codes after which the same request fails again, so that it is not repeated."""


class SendError(Exception):
    """A message could not be sent. The text names the reason, and never the URL."""

    def __init__(self, reason: str, *, is_permanent: bool = False) -> None:
        super().__init__(reason)
        self.is_permanent = is_permanent


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses each redirect. It would send the event to another host, perhaps without encryption."""

    def redirect_request(self, *_: Any) -> None:
        return None


def send_once(url: str, document: Mapping[str, Any], *, timeout_s: float = REQUEST_S) -> None:
    """Send a message to one URL, once.

    Args:
        url: the URL, which was checked.
        document: the message. The user reads `title` and `text`.
        timeout_s: the longest wait for the service, in seconds, for each operation of the connection.

    Raises:
        SendError: the message was not accepted.

    Example:
        send_once("https://example.org/hook", {"title": "otter: rank 3 was given up", "text": "…"})
    """
    if needs_apprise(url) or (url.lower().startswith("https:") and _is_known_to_apprise(url)):
        _send_with_apprise(url, document)
    else:
        _post(url, document, timeout_s)


def send_to_all(urls: Sequence[str], document: Mapping[str, Any], *, limit_s: float = 20.0) -> list[str]:
    """Send a message to each URL, with further tries. Return a sentence for each URL that did not accept it.

    Args:
        urls: the URLs.
        document: the message.
        limit_s: the seconds after which no further try begins.

    Example:
        failures = send_to_all(urls, document)
    """
    until = time.monotonic() + limit_s
    # All at the same time, because a service that hangs must not delay the others.
    reasons = in_parallel(lambda url: _try_several_times(url, document, until), urls)
    return [
        f"{describe_target(url, number, len(urls))}: {reason}"
        for number, (url, reason) in enumerate(zip(urls, reasons, strict=True), start=1)
        if reason is not None
    ]


def _try_several_times(url: str, document: Mapping[str, Any], until: float) -> str | None:
    """Return the reason of the last failure. None: the message was accepted."""
    reason = "no time was left"
    for pause_s in (*PAUSES_S, None):
        try:
            send_once(url, document)
            return None
        except SendError as error:
            reason = str(error)
            if error.is_permanent:
                return reason
        except Exception as error:  # noqa: BLE001 - a package of a service may raise anything, with the URL in its text
            reason = f"{type(error).__name__} in the package that sends it"
        if pause_s is None or time.monotonic() + pause_s > until:
            break
        time.sleep(pause_s)
    return reason


def _post(url: str, document: Mapping[str, Any], timeout_s: float) -> None:
    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    # A proxy never gets a message for this machine. For https, a proxy of the environment sees the host alone.
    proxies = {} if is_loopback(parts) else {"https": urllib.request.getproxies().get("https", "")}
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({name: value for name, value in proxies.items() if value}), _NoRedirects
    )
    headers = {"Content-Type": "application/json", "User-Agent": "replicas"}
    if login:  # a name and a password in the URL, with reserved characters as %40
        headers["Authorization"] = f"Basic {base64.b64encode(unquote_to_bytes(login)).decode()}"
        url = parts._replace(netloc=host).geturl()
    request = urllib.request.Request(url, data=json.dumps(document).encode(), headers=headers, method="POST")
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            answer.read(MAX_ANSWER)
    except urllib.error.HTTPError as error:
        with error:
            code = error.code
        if 300 <= code < 400:
            raise SendError(
                f"it answers with a redirect (HTTP {code}), which is not followed", is_permanent=True
            ) from None
        raise SendError(f"it answers HTTP {code}", is_permanent=code in PERMANENT) from None
    except TimeoutError:
        raise SendError(f"no answer in {timeout_s:g} s") from None
    except urllib.error.URLError as error:
        raise SendError(_describe(error.reason, timeout_s)) from None
    except (OSError, ValueError, EOFError) as error:
        raise SendError(_describe(error, timeout_s)) from None
    except Exception as error:  # noqa: BLE001 - http.client has errors of its own, such as BadStatusLine
        raise SendError(f"it closed the connection without an answer ({type(error).__name__})") from None


def _describe(reason: object, timeout_s: float) -> str:
    """Return a failure in words that cannot contain the URL."""
    if isinstance(reason, TimeoutError):
        return f"no answer in {timeout_s:g} s"
    words = getattr(reason, "strerror", None) or getattr(reason, "verify_message", None) or ""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(reason).__name__).lower()
    return f"{name}: {words}" if words else name


def _is_known_to_apprise(url: str) -> bool:
    """Return True if apprise is installed and knows the service of an https URL, such as a webhook of Slack."""
    try:
        from executors.notices.with_apprise import is_valid
    except ImportError:
        return False
    return is_valid(url)


def _send_with_apprise(url: str, document: Mapping[str, Any]) -> None:
    try:
        from executors.notices.with_apprise import send_text
    except ImportError:
        raise SendError("the package apprise is not installed there", is_permanent=True) from None
    if not send_text(url, str(document.get("title", "")), str(document.get("text", ""))):
        raise SendError("apprise could not send it")
