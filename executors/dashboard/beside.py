"""Serves a dashboard in another process beside a command, for `replicas launch --dashboard`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from threading import Thread
from typing import IO, Any

BEGIN_S = 15.0  # the longest wait for the address; the packages are imported in half a second


def check_packages() -> None:
    """Check that the packages of a dashboard are installed.

    Raises:
        MissingDependencyError: one is missing. The message has the line that installs it.
    """
    import executors.dashboard.server  # noqa: F401 - its import makes the check


@contextlib.contextmanager
def dashboard_beside(store_url: str, run_id: str, say: Callable[[str], None]) -> Iterator[None]:
    """Serve while the block runs, and open the page of a run in the browser.

    A dashboard that cannot be started is a line of text, and the run continues.

    Args:
        store_url: the url of the run's store.
        run_id: the run.
        say: prints a line.

    Example:
        with dashboard_beside(view.store.url, view.run_id, print):
            run.wait()
    """
    # In a session of its own, so that the page still shows the end of the run after Ctrl-C. The end of stdin ends the
    # server, also if this process is killed.
    process = subprocess.Popen(
        [sys.executable, "-m", "executors.dashboard", store_url, run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _show(_first_line(process.stdout), say)
        yield
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _first_line(stream: IO[bytes]) -> dict[str, Any]:
    """Return the first line of a stream as a JSON object. Empty if it does not come in time."""
    line: Future[bytes] = Future()
    Thread(target=lambda: line.set_result(stream.readline()), name="replicas-dashboard", daemon=True).start()
    with contextlib.suppress(ValueError):
        if wait([line], BEGIN_S).done and isinstance(found := json.loads(line.result()), dict):
            return found
    return {}


def _show(begun: dict[str, Any], say: Callable[[str], None]) -> None:
    import webbrowser

    if (address := begun.get("url")) is None:
        say(f"The dashboard could not be started. {begun.get('error', '')}".strip())
        return
    say(f"Dashboard: {address}")
    if begun["has_browser"]:
        webbrowser.open(address)
    else:
        say(f"From your own machine, forward the port first: {begun['forward']}")
