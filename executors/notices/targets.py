"""Checks the URLs of `--notify`, and reads them from variables and files.

No message here repeats a URL, because its path is usually the password. A URL is named by its number and its scheme.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from executors.errors import MissingDependencyError, did_you_mean, install_command

REFERENCE = re.compile(r"(env|file):([^/].*|/[^/].*)")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
FORMS = "Give a URL such as https://…, env:NAME for the value of a variable, or file:PATH for the lines of a file."
MAX_TARGETS, MAX_URL = 20, 4000
LOCAL_NAMES = ("localhost", "ip6-localhost")


def resolve_targets(texts: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the URLs that a user gave, checked.

    Args:
        texts: URLs, `env:NAME` for the URLs in a variable, or `file:PATH` for the URLs in a file, one a line.
        environ: the variables. Default: the environment of this process.

    Raises:
        TypeError: a value is not a text.
        ValueError: a value is not a URL to which notifications can be sent. The message does not contain the URL.
        MissingDependencyError: a URL needs the package apprise, which is not installed.

    Example:
        resolve_targets(["env:SLACK_URL"])
    """
    if isinstance(texts, str):
        raise TypeError("notify must be a list of URLs, as in ['env:SLACK_URL'], got a string.")
    found: list[str] = []
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise TypeError(f"notify must be a list of URLs, and its value {number} is a {type(text).__name__}.")
        found += _read_reference(text, environ) if is_reference(text) else text.split() or [""]
    for number, url in enumerate(found, start=1):
        check_target(url, number)
    if len(found) > MAX_TARGETS:
        raise ValueError(f"notify takes at most {MAX_TARGETS} URLs, got {len(found)}.")
    return tuple(dict.fromkeys(found))


def is_reference(text: str) -> bool:
    """Return True if a text names the place of URLs, as `env:NAME` or `file:PATH`, and contains no secret.

    Args:
        text: the text.
    """
    return REFERENCE.fullmatch(text.strip()) is not None


def _read_reference(text: str, environ: Mapping[str, str] | None) -> list[str]:
    kind, _, name = text.strip().partition(":")
    if kind == "env":
        value = (os.environ if environ is None else environ).get(name, "")
        if not value.strip():
            raise ValueError(f"notify names the variable {name!r}, which is not set. Set it, or give another one.")
        return value.split()
    try:
        content = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ValueError(f"notify names the file {name!r}, which cannot be read: {reason}.") from None
    lines = [line.strip() for line in content.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"notify names the file {name!r}, which has no URL. Write one URL a line.")
    return found


def check_target(url: str, number: int = 1) -> None:
    """Check that notifications can be sent to a URL. Nothing is sent.

    Args:
        url: the URL.
        number: its number in the user's list, for messages.

    Raises:
        ValueError: the URL is not legal, or is not one of those that this project or apprise can send to.
        MissingDependencyError: the URL needs the package apprise, which is not installed.

    Example:
        check_target("https://example.org/hooks/a1b2")
    """
    scheme = SCHEME.match(url)
    if scheme is None:
        raise ValueError(f"notify: value {number} is not a URL. {FORMS}")
    name = scheme[1].lower()
    if len(url) > MAX_URL or not url.isprintable() or any(char.isspace() for char in url):
        raise ValueError(f"notify: value {number} ({name}://…) has spaces, control characters, or is too long.")
    if name == "http":
        if not is_loopback(_split(url, number)):
            raise ValueError(
                f"notify: value {number} sends its URL unencrypted: http:// is accepted for this machine only. "
                "Use https://."
            )
    elif name == "https":
        _split(url, number)
    else:
        _check_with_apprise(url, name, number)


def _split(url: str, number: int) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError(f"notify: value {number} has no valid host or port. {FORMS}") from None
    if not parts.hostname:
        raise ValueError(f"notify: value {number} names no host. {FORMS}")
    return parts


def is_loopback(parts: SplitResult) -> bool:
    """Return True if a URL names this machine.

    Args:
        parts: the parts of the URL.
    """
    host = parts.hostname or ""
    if host in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def needs_apprise(url: str) -> bool:
    """Return True if only the package apprise can send to a URL.

    Args:
        url: the URL.
    """
    return not url.lower().startswith(("https://", "http://"))


def _check_with_apprise(url: str, scheme: str, number: int) -> None:
    near = did_you_mean(scheme, ["https", "http"]) if scheme not in ("https", "http") else ""
    if near:
        raise ValueError(f"notify: value {number} has the unknown scheme {scheme!r}.{near}")
    try:
        from executors.notices.with_apprise import is_known_scheme, is_valid
    except ImportError:
        raise MissingDependencyError(
            f"Notifications to {scheme}://… need the package apprise (value {number} of notify). Install it with: "
            f"{install_command('notify')}"
        ) from None
    if not (words := is_known_scheme(scheme)):
        if not is_valid(url):
            raise ValueError(
                f"notify: value {number} ({scheme}://…) lacks a part that this service needs, such as a token or a "
                "channel. https://appriseit.com/services/ shows the form."
            )
        return
    raise ValueError(f"notify: value {number} has the unknown scheme {scheme!r}.{words}")


def describe_target(url: str, number: int, of: int) -> str:
    """Return the name of a URL in messages, without its secret part: `notification URL 1 of 2 (slack)`.

    Args:
        url: the URL.
        number: its number, from 1.
        of: how many there are.
    """
    scheme = SCHEME.match(url)
    return f"notification URL {number} of {of} ({scheme[1].lower() if scheme else 'no scheme'})"
