"""Decides which requests a dashboard answers. The browser must have the token, and ask the dashboard's own address.

A request from another site must not read runs or press buttons, although the browser that sends it also has the cookie.
So the names of the host and of the origin are checked, and each button needs a second value that only a page of the
dashboard has.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

TOKEN = "token"  # the name of the parameter in the address that the command prints
PROOF = "x-replicas-proof"  # the header that a button sends
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = frozenset({"", "0.0.0.0", "::"})
"""Addresses that a server binds to listen on all interfaces."""
MAX_BODY = 4096  # bytes
HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Access:
    """The token of a dashboard, and the values that follow from it.

    Args:
        host: the address that the server binds.
        token: the token. None: a new random one.

    Example:
        access = Access("127.0.0.1")
        access.is_own_host("127.0.0.1:8265")  # True
    """

    def __init__(self, host: str, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(32)
        # The cookie and the proof do not tell the token, so a page that leaks one of them does not leak the others.
        self.cookie = self._derived("cookie")
        # A browser sends a cookie to all ports of a host. With one name, a second dashboard would replace the cookie of
        # the first one, whose pages would then be refused.
        self.cookie_name = f"replicas_dashboard_{self._derived('name')[:8]}"
        self.proof = self._derived("proof")
        self._names = {*LOOPBACK, host.lower()} if host not in ANY else {*LOOPBACK, *_own_names()}
        self._takes_addresses = host in ANY

    def is_token(self, given: str) -> bool:
        """Return True if a text is the token. The time of the comparison does not depend on the text."""
        return hmac.compare_digest(given.encode(), self.token.encode())

    def has_cookie(self, header: str) -> bool:
        """Return True if the header `Cookie` has the value that the token gives.

        Args:
            header: the value of the header.
        """
        try:
            found = SimpleCookie(header).get(self.cookie_name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self.cookie.encode())

    def has_proof(self, header: str) -> bool:
        """Return True if a button was pressed on a page of this dashboard.

        Args:
            header: the value of the header `PROOF`.
        """
        return hmac.compare_digest(header.encode(), self.proof.encode())

    def is_own_host(self, header: str) -> bool:
        """Return True if the header `Host` names this dashboard.

        A page of another site can get a name of its own to lead here (DNS rebinding), but no address in digits and no
        name of this machine. Any port is right, because `ssh -L` may forward another one.

        Args:
            header: the value of the header.
        """
        try:
            parts = urlsplit(f"//{header}")
            name, _ = parts.hostname, parts.port
        except ValueError:
            return False
        if not name or parts.netloc != header or parts.username is not None or "@" in header or parts.path:
            return False
        if name in self._names:
            return True
        return self._takes_addresses and _is_address(name)

    def _derived(self, purpose: str) -> str:
        return hmac.digest(self.token.encode(), purpose.encode(), "sha256").hex()


class Guard:
    """An ASGI application that answers each request that has no access with 403, and passes the others on.

    Args:
        app: the application behind it.
        access: the token and the names of the host.
        is_read_only: True: no request may change anything.
    """

    def __init__(self, app: App, access: Access, *, is_read_only: bool) -> None:
        self._app = app
        self._access = access
        self._is_read_only = is_read_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket: the application has none
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = _headers_of(scope)
        if location := self._entry(scope, headers):
            cookie = f"{self._access.cookie_name}={self._access.cookie}; Path=/; HttpOnly; SameSite=Strict"
            await _answer(send, 303, b"", {"location": location, "set-cookie": cookie})
        elif not self._is_allowed(scope, headers):
            await _answer(send, 403, b"Forbidden\n", {"content-type": "text/plain"})
        else:
            await self._app(scope, receive, _with_headers(send))

    def _entry(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """Return the address without the token, if the request has the token in its address. Empty if it has none."""
        try:
            query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), max_num_fields=20)
        except ValueError:  # too many parameters
            return ""
        given = [value for name, value in query if name == TOKEN]
        is_entry = scope["method"] == "GET" and len(given) == 1 and self._access.is_own_host(headers.get("host", ""))
        if not is_entry or not self._access.is_token(given[0]):
            return ""
        rest = urlencode([each for each in query if each[0] != TOKEN])
        # Not the raw path: "//host" would be the address of another site.
        path = "/" + quote(scope["path"].lstrip("/\\"))
        return path + (f"?{rest}" if rest else "")

    def _is_allowed(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        access, host, origin = self._access, headers.get("host", ""), headers.get("origin")
        if not access.is_own_host(host) or not access.has_cookie(headers.get("cookie", "")):
            return False
        if origin is not None and origin != f"http://{host}":
            return False
        if scope["method"] == "GET":
            # A site on another port of this machine is "same-site", and gets nothing but a page to look at.
            is_page = headers.get("sec-fetch-mode", "navigate") == "navigate"
            return is_page or headers.get("sec-fetch-site", "same-origin") == "same-origin"
        size = headers.get("content-length", "0")
        is_small = size.isdecimal() and int(size) <= MAX_BODY and "transfer-encoding" not in headers
        is_button = scope["method"] == "POST" and origin is not None and access.has_proof(headers.get(PROOF, ""))
        return is_small and is_button and not self._is_read_only


def _headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request. One that was sent twice has no value, because a check would read only one."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        found[key] = "\0" if key in found else value.decode("latin-1")
    return found


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return send_with_headers


async def _answer(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    given = [(name.encode(), value.encode()) for name, value in {**HEADERS, **headers}.items()]
    size = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*given, size]})
    await send({"type": "http.response.body", "body": body})


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, f"{name}.local", socket.getfqdn().lower()} - {""}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
