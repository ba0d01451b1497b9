"""Stops, cancels and resumes runs for the buttons, by the command itself.

A button calls the command in a process of its own. So a button has the checks, messages and effects of the command. A
stop that has begun also ends the run if the dashboard ends.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from executors.view.report.text import one_line

VERBS: Mapping[str, Sequence[str]] = {
    "stop": ("stop", "--json"),
    "cancel": ("cancel", "--json"),
    "resume": ("resume", "--detach", "--json"),
}
"""The verb of each button, with its options. A resumed run continues when the dashboard ends."""
BEGUN = {
    "stop": "Stopping: each replica ends after its next round, or is cancelled after 10 minutes.",
    "cancel": "Cancelling the replicas.",
    "resume": "Starting replicas again.",
}
DONE = {"stop": "The run was stopped.", "cancel": "The run was cancelled.", "resume": "The replicas start again."}
MAX_TEXT = 2000
MAX_AT_ONCE = 8


@dataclass(frozen=True)
class Action:
    """The progress or the result of a button, for the page."""

    state: Literal["working", "done", "failed"]
    text: str


class Actions:
    """The actions of a dashboard. A run has at most one at a time.

    Args:
        on_end: called with the key of the run when an action has ended.

    Example:
        actions = Actions(print)
        actions.begin("1f2e3d4c/brave-otter-7f3a", "s3://bucket/runs/brave-otter-7f3a", "stop")
    """

    def __init__(self, on_end: Callable[[str], object]) -> None:
        self._on_end = on_end
        self._actions = dict[str, Action]()
        self._lock = threading.Lock()

    def of(self, key: str) -> Action | None:
        """Return the last action on a run. None: there was none.

        Args:
            key: the key of the run.
        """
        return self._actions.get(key)

    def begin(self, key: str, address: str, verb: str) -> bool:
        """Begin an action in another process. Return False if another one takes place.

        Args:
            key: the key of the run.
            address: the address of the run.
            verb: "stop", "cancel" or "resume".
        """
        with self._lock:
            busy = [each for each, action in self._actions.items() if action.state == "working"]
            if key in busy or len(busy) >= MAX_AT_ONCE:
                return False
            self._actions[key] = Action("working", BEGUN[verb])
        threading.Thread(target=self._act, args=(key, address, verb), name="replicas-action", daemon=True).start()
        return True

    def _act(self, key: str, address: str, verb: str) -> None:
        name, *options = VERBS[verb]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "executors.cli", name, address, *options],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                start_new_session=True,  # Ctrl-C ends the dashboard, and not what it has begun
            )
            action = _action_of(verb, done)
        except OSError as error:
            action = Action("failed", f"The command could not be started: {error.strerror}.")
        self._actions[key] = action
        self._on_end(key)


def _action_of(verb: str, done: subprocess.CompletedProcess[bytes]) -> Action:
    """Return the result of a command for the page."""
    document: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(done.stdout)
    if not isinstance(document, dict):
        words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Action("failed", one_line(words or f"replicas {verb} ended with {done.returncode}.", MAX_TEXT))
    if isinstance(error := document.get("error"), str):
        return Action("failed", one_line(error, MAX_TEXT))
    if isinstance(problem := document.get("problem"), str) and problem:
        return Action("failed", one_line(problem, MAX_TEXT))
    return Action("done", DONE[verb])
