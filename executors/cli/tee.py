"""The output of some ranks, shown while their run is followed; `--tee`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from executors.cli.logs import without_bars
from executors.errors import ReplicasError
from executors.logs.follower import WHOLE, begins
from executors.run.run import Run, view_of
from executors.run.run_logs import Lines, log_pieces
from executors.run.run_view import RunView

END_S = 5.0  # a service's last lines come late; they are in its log


class Tee:
    """Follows the logs of some ranks in a thread, from their beginning to their end.

    Args:
        show: is given each line, led by its rank.
    """

    def __init__(self, run: Run, ranks: Sequence[int], show: Callable[[str], None]) -> None:
        shared = view_of(run)
        # A view of its own: this thread looks while another one looks through the run's view.
        handles = shared.handles[: shared.world_size]
        self._view = RunView(shared.store, shared.run_id, executor=shared.executor, handles=handles)
        self._ranks = ranks
        self._show = show
        self._thread = threading.Thread(target=self._follow, name="replicas-tee", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            chosen = Lines(clean=without_bars)
            for line in log_pieces(self._view, self._ranks, WHOLE, True, "all", chosen, note=lambda words: None):
                if not line.endswith(begins(0)):  # the first attempt is no news
                    self._show(line.rstrip("\n"))
        except ReplicasError as error:
            self._show(f"The output of ranks cannot be shown any more: {error}")

    def finish(self) -> None:
        """Wait until all was shown, for a moment."""
        self._thread.join(END_S)
