"""The option `--tee`: shows the output of some ranks while their run is watched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from executors.cli.logs import without_bars_of
from executors.errors import ReplicasError
from executors.logs.follower import WHOLE, begins
from executors.run.run import Run, view_of
from executors.status import name_ranks
from executors.view.run_logs import LineFilter, log_pieces
from executors.view.run_view import RunView

END_S = 5.0  # seconds to wait for the last lines, which services deliver late; the log of the service also has them


class Tee:
    """Follows the logs of some ranks in a thread, from their beginning to their end.

    Args:
        run: the run.
        ranks: the ranks.
        show: called with each line. The line begins with its rank.

    Example:
        Tee(run, [0, 2], print).finish()
    """

    def __init__(self, run: Run, ranks: Sequence[int], show: Callable[[str], None]) -> None:
        shared = view_of(run)
        # Use a separate view, because another thread reads through the run's view at the same time.
        handles = shared.handles[: shared.world_size]
        self._view = RunView(shared.store, shared.run_id, executor=shared.executor, handles=handles)
        self._ranks = ranks
        self._show = show
        self._thread = threading.Thread(target=self._follow, name="replicas-tee", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            chosen = LineFilter(clean=without_bars_of(self._view))
            for line in log_pieces(self._view, self._ranks, WHOLE, True, "all", chosen, note=lambda words: None):
                if not line.endswith(begins(0)):  # the first attempt of a rank needs no line about its beginning
                    self._show(line.rstrip("\n"))
        except ReplicasError as error:
            self._show(f"The output of {name_ranks(self._ranks)} cannot be shown any more: {error}")

    def finish(self) -> None:
        """Wait up to five seconds until all lines were shown."""
        self._thread.join(END_S)
