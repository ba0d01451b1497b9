"""Executors whose resume is overtaken: it reads the run, another resume restarts ranks, and then it launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from executors import LocalProcessExecutor, Run, attach
from executors.backend import Observation, PendingReplica
from executors.run.resume import resume
from executors.run.run import view_of
from executors.settings.run_spec import StartSpec


class OvertakenLocally(LocalProcessExecutor):
    """Runs another resume before its own start. Both resumes have read the same state of the run."""

    by_ranks: ClassVar[list[int] | None] = None
    """The ranks that the other resume restarts. None: all ranks that have ended."""

    def start_ranks(self, start: StartSpec, *more: Any) -> Any:
        if start.spec.attempt > 0:
            other = LocalProcessExecutor(preload=(), term_grace_s=0.5)
            other.start_ranks(start.with_spec(ranks=tuple(self.by_ranks or start.ranks)), *more)
        return super().start_ranks(start, *more)


class OvertakenWhileLooking(LocalProcessExecutor):
    """Ends a replica and runs another resume, once, while this resume reads the state of the run.

    The records are then listed already, and the backend was not asked yet.
    """

    is_fenced = False

    def observe(self, replicas: Sequence[PendingReplica]) -> list[Observation]:
        if not self.is_fenced:
            self.is_fenced = True
            (each,) = replicas
            self.cancel(each.handle)
            other = LocalProcessExecutor(preload=(), term_grace_s=0.5)
            let_another_go_first(each.handle.metadata["run_id"], other, None)
        return super().observe(replicas)


def let_another_go_first(run_id: str, executor: Any, ranks: list[int] | None) -> None:
    """Resume a run as another process would: it reads the state of the run by itself."""
    found = attach(run_id)
    resume(Run(view_of(found).store, run_id, executor=executor), ranks=ranks)
