"""Handlers for the records of the loggers `executors` and `diloco` in a replica.

This module is imported only after `logging`. That import takes as long as a fork, and its hooks slow down each later
fork.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

CAPTURED = "py.warnings"
"""The logger that gets warnings after the user has called `logging.captureWarnings(True)`."""
MAX_FRAMES = 20


def attach_handlers(
    names: Iterable[str], add: Callable[[str, str], None], note: Callable[..., None]
) -> Callable[[], None]:
    """Add handlers to loggers, and return a function that removes them.

    Args:
        names: the names of the loggers. Their child loggers are included.
        add: gets the text of each record of level WARNING or above, and its place in the code.
        note: gets the message and the category of each warning that `logging.captureWarnings(True)` turned into a
            record.

    Example:
        detach = attach_handlers(["diloco"], warnings.add, note_warning)
    """
    handlers = [(name, _LoggerHandler(add)) for name in names]
    pairs: list[tuple[str, logging.Handler]] = [*handlers, (CAPTURED, _CapturedHandler(note))]
    for name, handler in pairs:
        logging.getLogger(name).addHandler(handler)

    def detach() -> None:
        for name, handler in pairs:
            logging.getLogger(name).removeHandler(handler)

    return detach


class _LoggerHandler(logging.Handler):
    """Passes on the records of our loggers. They are still printed as if this handler did not exist."""

    def __init__(self, add: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._add = add

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text = f"{text}: {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            self._add(text, f"{record.name}:{record.lineno}")
        # Python prints a record that no handler takes to stderr. This handler must not count as one.
        if logging.lastResort is not None and not _is_taken(record.name):
            logging.lastResort.handle(record)


def _is_taken(name: str) -> bool:
    """Return True if a handler other than this module's takes the records of a logger."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, _LoggerHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


class _CapturedHandler(logging.Handler):
    """Passes on warnings that `logging.captureWarnings(True)` redirects from `warnings.showwarning` to a logger."""

    def __init__(self, note: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            frame: FrameType | None = sys._getframe(1)
            for _ in range(MAX_FRAMES):
                if frame is None:
                    return
                # The record's text has file and source around the message. `logging._showwarning` has the message
                # without them.
                if frame.f_code.co_name == "_showwarning" and frame.f_globals.get("__name__") == "logging":
                    given: Any = frame.f_locals
                    self._note(given["message"], given["category"])
                    return
                frame = frame.f_back
