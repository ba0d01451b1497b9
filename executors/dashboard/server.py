"""The dashboard's server: its routes, and how it begins and ends."""

from __future__ import annotations

import errno
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executors.dashboard.access import PROOF, TOKEN, Access, Guard
from executors.dashboard.actions import VERBS, Actions
from executors.dashboard.board import Board, check_listing
from executors.dashboard.log_feed import LogFeeds, stacks_text
from executors.dashboard.pages import controls_parts, list_page, message_page, run_page
from executors.dashboard.run_feed import RunFeed
from executors.errors import ReplicasError, raise_missing_package
from executors.view.report.text import one_line

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise_missing_package("replicas dashboard", error, "dashboard")

PORT = 8265
POLL_S = 2.0  # between two requests of a page
FIRST_S, STATE_S = 0.3, 8.0  # how long the page of a run waits for its measurements, and for the state of the run
MAX_CONNECTIONS = 128
KEEP_ALIVE_S = 15
SHUTDOWN_S = 1
DIGEST = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a dashboard."""

    store: str | Path | None = None
    """The store whose runs are shown. None: the runs that this machine knows."""
    host: str = "127.0.0.1"
    port: int = PORT
    """The port. 0: any free one."""
    is_read_only: bool = False
    takes_other_port: bool = False
    """True: if the port is taken, take a free one."""


class Dashboard:
    """A dashboard that is bound to its port, and does not serve yet.

    Args:
        options: the options.

    Raises:
        MissingDependencyError: starlette or uvicorn is not installed.
        ReplicasError: the port is taken, or the store does not exist.

    Example:
        dashboard = Dashboard(Options(port=0))
        print(dashboard.address())
        dashboard.serve()
    """

    def __init__(self, options: Options) -> None:
        check_listing(options.store)
        self.options = options
        self.access = Access(options.host)
        self.board = Board(options.store)
        self._socket = _bind(options)
        self.port: int = self._socket.getsockname()[1]
        self._server: uvicorn.Server | None = None

    def address(self, run: tuple[str, str] | None = None) -> str:
        """Return the address to open, which has the token.

        Args:
            run: the url of the store and the id of a run, to open its page. None: the list.
        """
        host = self.options.host
        name = (
            "127.0.0.1"
            if host in ("", "0.0.0.0")
            else "[::1]"
            if host == "::"
            else f"[{host}]"
            if ":" in host
            else host
        )
        path = "/"
        if run is not None and (key := self.board.key_of(*run)) is not None:
            path = f"/runs/{key}"
        return f"http://{name}:{self.port}{path}?{TOKEN}={self.access.token}"

    def serve(self, on_start: Callable[[], None] = lambda: None) -> None:
        """Serve until Ctrl-C, SIGTERM or `stop`.

        Args:
            on_start: called when the first request can be answered.
        """
        config = uvicorn.Config(
            Guard(_application(self), self.access, is_read_only=self.options.is_read_only),
            http="h11", ws="none", lifespan="off", loop="asyncio",
            # The addresses of requests may hold the token, so no line about a request is logged.
            access_log=False, log_level="error", log_config=None, server_header=False, date_header=False,
            proxy_headers=False, limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )  # fmt: skip
        self._server = server = uvicorn.Server(config)
        self.board.start()
        try:
            on_start()
            server.run(sockets=[self._socket])
        except KeyboardInterrupt:  # uvicorn has ended, and raises the signal again
            pass
        finally:
            self.board.stop()
            self._socket.close()

    def stop(self) -> None:
        """Let `serve` return. Any thread may call it."""
        if self._server is not None:
            self._server.should_exit = True


def _bind(options: Options) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    for port in (options.port, 0) if options.takes_other_port else (options.port,):
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((options.host, port))
            bound.listen(MAX_CONNECTIONS)
            return bound
        except OSError as error:
            bound.close()
            problem = error
    if problem.errno == errno.EADDRINUSE:
        raise ReplicasError(
            f"Port {options.port} of {options.host or 'this machine'} is taken by another program, perhaps another "
            f"dashboard. Give another one with --port, or --port 0 for any free port."
        ) from problem
    raise ReplicasError(
        f"The dashboard cannot listen on {options.host!r}, port {options.port}: {problem.strerror or problem}. Give an "
        f"address of this machine with --host, and a free port with --port."
    ) from problem


class _Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _application(dashboard: Dashboard) -> Starlette:
    pages = _Pages(dashboard)
    return Starlette(
        routes=[
            Route("/", pages.list_runs),
            Route("/changes", pages.list_changes),
            Route("/runs/{store}/{run_id}", pages.show_run),
            Route("/runs/{store}/{run_id}/changes", pages.run_changes),
            Route("/runs/{store}/{run_id}/log", pages.run_log),
            Route("/runs/{store}/{run_id}/stacks", pages.run_stacks),
            *[
                Route(f"/runs/{{store}}/{{run_id}}/{verb}", pages.button(verb), methods=["POST"])
                for verb in ([] if dashboard.options.is_read_only else VERBS)
            ],
        ]
    )


class _Pages:
    """The answers to requests that have access."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self._board = dashboard.board
        self._logs = LogFeeds()
        self._actions = Actions(dashboard.board.look_soon)

    async def list_runs(self, request: Request) -> Response:
        """Answer with the list of runs."""
        self._board.want_list()
        if self._board.versions.newest is None:
            await run_in_threadpool(self._board.find_runs)
        shown = self._board.versions.newest
        rows = [] if shown is None else [shown.parts[key] for key in shown.order]
        head: Any = {"problem": self._board.problem, "older": ""} if shown is None else shown.charts
        version = 0 if shown is None else shown.version
        settings = self._settings("/changes", version)
        return HTMLResponse(list_page(rows, head, version, settings))

    async def list_changes(self, request: Request) -> Response:
        """Answer with the rows that are new for a page."""
        self._board.want_list()
        return _Json(self._board.versions.since(_number_in(request, "since")))

    async def show_run(self, request: Request) -> Response:
        """Answer with the page of a run."""
        feed = await run_in_threadpool(self._find, request)
        if feed is None:
            return self._unknown()
        shown, document = await run_in_threadpool(self._document_of, feed)
        settings = self._settings(f"/runs/{feed.key}/changes", 0 if shown is None else shown)
        if document is None:
            text = feed.row.problem or "The state of the run is being read."
            return HTMLResponse(message_page(feed.row.run_id, text, settings))
        parts = self._controls(feed)
        return HTMLResponse(await run_in_threadpool(run_page, document, parts, settings))

    async def run_changes(self, request: Request) -> Response:
        """Answer with what is new for the page of a run."""
        feed = await run_in_threadpool(self._find, request)
        if feed is None:
            return self._unknown()
        self._board.want_page(feed.key)
        changes = feed.versions.since(_number_in(request, "since"))
        return _Json({**changes, "controls": self._controls(feed)})

    async def run_log(self, request: Request) -> Response:
        """Answer with lines of a rank: those after a line, or those that have a text."""
        text = request.query_params.get("search", "")

        def read(feed: RunFeed, rank: int) -> dict[str, Any]:
            if text:
                return self._logs.search(feed, rank, text)
            return self._logs.lines(feed, rank, _number_in(request, "after"))

        return await self._of_rank(request, read)

    async def run_stacks(self, request: Request) -> Response:
        """Answer with the stacks that a rank left when it hung."""

        def read(feed: RunFeed, rank: int) -> dict[str, Any]:
            return {"lines": stacks_text(feed, rank), "note": ""}

        return await self._of_rank(request, read)

    async def _of_rank(self, request: Request, read: Callable[[RunFeed, int], dict[str, Any]]) -> Response:
        feed = await run_in_threadpool(self._find, request)
        if feed is None:
            return self._unknown()
        try:
            return _Json(await run_in_threadpool(read, feed, _number_in(request, "rank")))
        except (ReplicasError, ValueError) as error:
            return _Json({"lines": [], "last": 0, "note": one_line(str(error))})

    def button(self, verb: str) -> Callable[[Request], Awaitable[Response]]:
        """Return the answer to a button.

        Args:
            verb: the verb of the command that the button calls.
        """

        async def press(request: Request) -> Response:
            feed = await run_in_threadpool(self._find, request)
            if feed is None:
                return self._unknown()
            has_begun = self._actions.begin(feed.key, feed.address, verb)
            return _Json({"controls": self._controls(feed)}, status_code=202 if has_begun else 409)

        return press

    def _find(self, request: Request) -> RunFeed | None:
        store, run_id = request.path_params["store"], request.path_params["run_id"]
        return self._board.find(f"{store}/{run_id}") if DIGEST.fullmatch(store) else None

    def _document_of(self, feed: RunFeed) -> tuple[int | None, Mapping[str, Any] | None]:
        """Return the document of a run and its version, after a short wait for it.

        The document of a long run takes seconds. So the page begins without measurements, and gets them as a change.
        """
        self._board.want_page(feed.key)
        until = time.monotonic() + FIRST_S
        with feed.changed:
            while not feed.has_page and (left_s := until - time.monotonic()) > 0:
                feed.changed.wait(left_s)
            until += STATE_S
            while feed.now is None and not feed.row.problem and (left_s := until - time.monotonic()) > 0:
                feed.changed.wait(left_s)
        if (made := feed.document) is not None:
            return made
        return None, feed.quick_document()

    def _controls(self, feed: RunFeed) -> dict[str, str]:
        return controls_parts(feed.row, self._actions.of(feed.key), is_read_only=self._dashboard.options.is_read_only)

    def _settings(self, changes: str, version: int) -> dict[str, Any]:
        proof = "" if self._dashboard.options.is_read_only else self._dashboard.access.proof
        return {"changes": changes, "version": version, "poll_s": POLL_S, "proof": proof, "header": PROOF}

    def _unknown(self) -> Response:
        text = "The dashboard does not know this run."
        return HTMLResponse(message_page("No such run", text, self._settings("", 0)), status_code=404)


def _number_in(request: Request, name: str) -> int:
    """Return a parameter of a request that is a whole number. 0 if it is missing or something else."""
    text = request.query_params.get(name, "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def forward_line(dashboard: Dashboard) -> str:
    """Return the shell command that makes the dashboard reachable from the user's own machine.

    Args:
        dashboard: the dashboard, on a machine to which the user has connected by ssh.

    Example:
        forward_line(dashboard)  # "ssh -L 8265:127.0.0.1:8265 me@my-machine"
    """
    import getpass

    try:
        user = f"{getpass.getuser()}@"
    except (KeyError, OSError):  # a container without an entry for this user
        user = ""
    return f"ssh -N -L {dashboard.port}:127.0.0.1:{dashboard.port} {user}{socket.gethostname()}"


def can_open_browser() -> bool:
    """Return True if this machine has a browser with windows, so that the command can open a page."""
    import webbrowser

    try:
        found = webbrowser.get()
    except webbrowser.Error:
        return False
    # A browser in text mode has this class, and would take over the terminal.
    return type(found) is not webbrowser.GenericBrowser
