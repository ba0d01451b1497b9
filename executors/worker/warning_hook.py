"""Collects the warnings of a replica, from `warnings.warn` and from loggers. No other module collects warnings.

The hook does not change where a warning is shown: by the handlers that the user configured, or on stderr. The hook also
adds the warning to the attempt's `WarningLog`. It does not import `logging` itself, because replicas start faster
without it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import FrameType
from typing import Any

from executors.errors import ReplicasWarning
from executors.replica.warning_log import WarningLog

OURS = ("executors", "diloco")
"""The packages whose warnings are events, and the names of their loggers."""
BETWEEN = ("warnings", "_py_warnings", "logging", "executors.worker.warning_handlers", __name__)
"""The modules between the call of `warnings.warn` and this hook."""
MAX_FRAMES = 20


@contextlib.contextmanager
def collect_warnings(log: WarningLog) -> Iterator[None]:
    """Add the warnings of `executors` and `diloco` in this process to a log, within the block.

    Args:
        log: collects the warnings. After the block it gets no more.

    Example:
        with collect_warnings(WarningLog(attempt)):
            entrypoint()
    """
    note = functools.partial(_note_warning, log)
    shown_before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        note(message, category)
        shown_before(message, category, *where, **more)

    with contextlib.ExitStack() as leaving:

        def attach_to_loggers() -> None:
            from executors.worker.warning_handlers import attach_handlers

            leaving.callback(attach_handlers(OURS, log.add, note))

        if "logging" in sys.modules:
            attach_to_loggers()
        else:
            leaving.enter_context(_when_imported("logging", attach_to_loggers))
        warnings.showwarning = show
        try:
            yield
        finally:
            # If the user's code or `logging` has replaced the hook since, their function stays.
            if warnings.showwarning is show:
                warnings.showwarning = shown_before


def _note_warning(log: WarningLog, message: Warning | str, category: type[Warning]) -> None:
    """Add a warning to the log if code of this project raised it, or if its category is `ReplicasWarning`.

    Never raises.
    """
    with contextlib.suppress(Exception):
        # Because of `stacklevel`, a warning names the file and line of the user's code. So the stack is searched for
        # the caller of `warnings.warn`.
        frame = _caller()
        module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        if issubclass(category, ReplicasWarning) or module.partition(".")[0] in OURS:
            log.add(str(message), "" if frame is None else f"{module}:{frame.f_lineno}")


def _caller() -> FrameType | None:
    """Return the frame that called `warnings.warn`. None: none was found."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None or frame.f_globals.get("__name__") not in BETWEEN:
            return frame
        frame = frame.f_back
    return None


@contextlib.contextmanager
def _when_imported(name: str, act: Callable[[], None]) -> Iterator[None]:
    """Call a function once, right after a module was imported for the first time in the block."""
    finder = _Watching(name, act)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.stop()


class _Watching:
    """Finds one module as usual, and calls a function when the module is loaded."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def stop(self) -> None:
        """Remove this finder from the import system."""
        with contextlib.suppress(ValueError):  # the finder was removed before
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the module's spec, whose loader acts after the module was executed. None: another module."""
        if name != self._name:
            return None
        self.stop()
        # Ask the other finders in their order: one of them ignores a `logging.py` of the user.
        specs = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
        spec = next((found for found in specs if found is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_act(module: Any) -> None:
                execute(module)
                with contextlib.suppress(Exception):  # an import of the user must not fail because of this hook
                    self._act()

            loader.exec_module = execute_and_act
        return spec
