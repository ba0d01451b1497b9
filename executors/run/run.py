"""A run: wait for it, read what it left, cancel it and collect its results."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from executors.backend import JobsOfRun, no_progress
from executors.errors import BackendError, StoreError
from executors.patience import FOLLOWER, KEEPER, PAID_KEEPER, Patience
from executors.protocol import BY_USER, Outcome, ReplicaStatus, ServerlessExecutor
from executors.report.root_cause import raise_root_cause
from executors.restarts.decision_log import DecisionLog
from executors.restarts.lease import LeaseHolder
from executors.restarts.restart_view import counted
from executors.run.canceller import Canceller
from executors.run.external_controller import ExternalController
from executors.run.launch_starter import LaunchStarter
from executors.run.notebook import Display, in_notebook
from executors.run.progress import View, open_view
from executors.run.removal import remove, withdraw_jobs
from executors.run.run_logs import Ranks
from executors.run.run_view import RunView
from executors.run.waiter import Waiter
from executors.settings.run_spec import StartSpec
from executors.status import ReplicaState, RunStatus
from executors.store.parallel import within

UPDATE_S = 10.0  # how long `add` waits for the store once its replicas are started


class Run(RunView):
    """One run: follow it, read its logs, cancel it, collect its results.

    A context manager: leaving it cancels what still runs.
    """

    at_exit: Callable[[], None] | None = None
    """What this process does at its exit, unless it has waited for the run's end, or ended it."""
    n_withdrawn = 0
    """How many jobs that a queue still held the last `cancel` of the whole run deleted."""
    shows_progress = False
    """Whether waiting for it draws how far it is."""
    _leases: tuple[LeaseHolder, ...] = ()
    _controller: ExternalController | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def wait(self, timeout: float | None = None, *, n: int | None = None) -> bool:
        """Wait until every replica has ended, or `n` of them; False if `timeout` seconds were over first.

        Ctrl-C leaves the run alone.
        """
        if n is not None and not 1 <= n <= len(self.ranks):
            raise ValueError(f"Run {self.run_id!r} has {len(self.ranks)} replicas, got n={n}.")
        try:
            is_over = self._waiter.wait(n, timeout, self._view())
        except StoreError as error:
            if words := self.end_refused(error):
                error.add_note(words)
            raise
        if is_over and n in (None, len(self._reader.ranks)):
            self._settle()
        return is_over

    def as_completed(self) -> Iterator[Outcome]:
        """Yield how each replica ended as soon as it has, whose `rank` it says; ends with the run.

        A rank that is resumed meanwhile comes once more when its new attempt ends.
        """
        yield from self._waiter.as_completed(self._view())
        self._settle()

    def end_early(self, now: RunStatus, option: str) -> str | None:
        """End the run at a failure before anybody's first round, if it was launched so; return what to say, once.

        Args:
            option: what would have ended it, as the caller's users write it.
        """
        return self._waiter.end_early(now, option)

    def show(self) -> None:
        """Show the run in a cell of a notebook: status, progress and loss, renewed every second until it has ended.

        Returns at once. Any number of cells may show it.
        """
        if in_notebook():
            self._display.show()
        else:
            print(
                "replicas: Run.show() draws in a notebook. Elsewhere use launch(…, progress=True), or the command "
                f"`replicas wait {self.run_id}`.",
                file=sys.stderr,
            )

    def results(self) -> list[Any]:
        """Wait, and return what each replica's entrypoint returned, in rank order.

        When as many as `min_replicas` gave a result, it is None for the others. It is None, too, for ranks that were
        cancelled by themselves, as with `cancel(rank=2)`, if any other rank gave a result.

        Raises:
            ReplicaError: a replica gave no result. The error is the earliest failure, with the remote traceback as its
                message; the other failures are its notes.
        """
        self.wait()
        outcomes = self.outcomes()
        n_done = sum(outcome.status is ReplicaStatus.SUCCEEDED for outcome in outcomes)
        if n_done < (self.record.settings.min_replicas or len(counted(self.decisions, outcomes))):
            raise_root_cause(outcomes)
        return [outcome.result for outcome in outcomes]

    def request_cancel(self) -> None:
        """Leave the cancel marker of every replica that has not ended; `cancel` also waits for their end."""
        self._canceller.request()

    def end_refused(self, error: BaseException) -> str:
        """End the jobs of a run that this process keeps attached, after its store has refused this process for good.

        Such a store refuses the replicas as well: they have the same credentials. They can neither exchange what they
        learn nor leave a result, so what they cost is lost.

        Args:
            error: why the run cannot be watched any more.

        Returns: what was ended, and what may still run; empty if nothing was to be done.

        Example:
            print(run.end_refused(error))
        """
        if not self._leases or not isinstance(error, StoreError) or not error.refusal:
            return ""
        if not self.placements.ends_jobs:
            return ""
        for lease in self._leases:
            lease.end()
        told = self.placements.end_jobs(JobsOfRun(self.run_id, self.store.url, self.record.created_at), self._tell)
        if not told.is_complete:
            return told.what_is_left
        jobs = f"{told.n_ended} job{'s' * (told.n_ended != 1)}"
        return f"Its {jobs} were ended at the service, because replicas cannot use a store that refuses them."

    def finish_cancel(self) -> None:
        """End what `request_cancel` has marked, as `cancel` does, which would note the same decision once more."""
        self._canceller.end(BY_USER)
        self._settle()

    @property
    def is_store_silent(self) -> bool:
        """Whether the store did not answer the last `cancel`."""
        return self._canceller.is_store_silent

    @property
    def was_ended_without_store(self) -> bool:
        """Whether `cancel` ended the run's jobs at their service, while the store did not answer."""
        return self._canceller.was_ended_without_store

    def cancel(self, rank: Ranks = None) -> None:
        """Cancel one replica, some, or all that still run. The others stay as they are.

        Local replicas are gone when it returns. At a service, it returns when the service has accepted to end their
        jobs; how long it takes to end a container is up to the service. A store that does not answer is not waited for:
        the service is asked all the same, and a line on stderr says so.

        A queue may hold jobs whose replicas it has ended, and would start them again. The cancel of a whole run deletes
        these as well, also where the run has ended.

        Args:
            rank: one rank, or some. None: all.

        Raises:
            BackendError: a service did not end some jobs. The message says which, and how to end them. Their cancel
                markers are in the store all the same, if that answers.
            ValueError: the run has no such rank.

        Example:
            attach("first-try").cancel(rank=3)
        """
        chosen = [rank] if isinstance(rank, int) else rank
        self._canceller.cancel(None if chosen is None else [self.check_rank(each) for each in chosen])
        if rank is None:
            self._settle()
            try:
                self.n_withdrawn = self._canceller.n_withdrawn + withdraw_jobs(self)
            except BackendError as error:  # the replicas have been cancelled: that must not look as if it had failed
                print(
                    f"replicas: {self.run_id} was cancelled. Whether a queue still holds jobs of it could not be found "
                    f"out: {error}",
                    file=sys.stderr,
                )

    def stop(self, within_s: float = 600.0, wait: Callable[[float], bool] | None = None) -> None:
        """End the run well; returns when its replicas are gone.

        Each ends at the next round that is adopted, or when its entrypoint looks at `replica.ending_s`. What has not
        after `within_s` seconds is ended as by a cancel. `resume` goes on from there.

        Args:
            wait: waits meanwhile, so many seconds at most; False if the run is not over then. None: as `wait` does.
        """
        self._canceller.stop(within_s, wait or self.wait)
        self._settle()

    def add(
        self,
        executor: str | ServerlessExecutor,
        n: int,
        *,
        on_progress: Callable[[str], None] = no_progress,
        **asked: Any,
    ) -> list[int]:
        """Start `n` more replicas of the run, anywhere its rendezvous can be reached; return their ranks.

        They have new ranks, beyond those of the launch, and join the others at their next round. From then on they are
        replicas of the run like the others: `wait`, `results`, `cancel` and all else count them. What they see as
        `world_size` is that of the launch, which never changes; see `Replica.shard` for their data. They come on top
        of the run's `max_cost`.

        Args:
            executor: a backend's name, or an executor. What it starts on other machines gets the code of this folder,
                if the run was launched without any.
            on_progress: called with a few words on the progress, if the start takes long. Default: nothing is reported.
            asked: any of these. `gpu`, `timeout`: None: as launched; "" is no GPU. `secrets`: None: as launched, on a
                backend of the launch; else these alone. `env`: values are not recorded, so those of the launch have to
                be given again. `detach`: let them go on when this process ends, as they do
                anyway where the run does: somebody has left `replicas watch`, or resumed with `detach`.
                `task_digest`, `trust_bucket`: who vouches for the task where another machine launched the run; see
                `resume`.

        Raises:
            ValueError: the run is over, or a value of its environment, or its key, is missing.
            UntrustedTaskError: another machine launched the run, and nobody vouches for its task.
            BackendError: the backend cannot start single ranks, or sees no such rendezvous; `LaunchError` when it
                refused a replica.
        """
        from executors.run.addition import Addition, add_replicas

        added = add_replicas(self, executor, Addition(n=n, **asked), on_progress)
        ranks = list(added.start_spec.ranks)
        try:
            if not added.start_spec.spec.settings.detach:
                self.keep_here([added.start_spec], added.lease)
            with contextlib.suppress(StoreError):  # what was seen a moment ago has none of them
                within(UPDATE_S, self._reader.update, self.store.url)
        except KeyboardInterrupt:  # the caller never hears of these ranks
            self.cancel(ranks)
            raise
        return ranks

    def keep_here(
        self,
        start_specs: Sequence[StartSpec],
        lease: LeaseHolder | None,
        say: Callable[[str], None] | None = None,
        *,
        log: DecisionLog | None = None,
    ) -> ExternalController:
        """Let this process answer ends whose supervisors are gone, whenever it looks at the run while it waits.

        Called again, it keeps more of the run.

        Args:
            start_specs: the values that start its ranks again. Ranks without such values are left alone.
            lease: where its replicas end unless somebody renews it; it ends with the run.
            say: gets a sentence on each start that failed. None: they go to stderr.
            log: the log of decisions, as far as the caller has read it.
        """
        self._leases += () if lease is None else (lease,)
        if self._controller is not None:
            self._controller.starter.learn(start_specs)
            return self._controller
        on_progress = say or (lambda words: print(f"replicas: {words}", file=sys.stderr))
        starter = LaunchStarter(self.placements, start_specs, on_progress)
        log = log or DecisionLog(
            self.store, self.run_id, key=next((start_spec.spec.key for start_spec in start_specs), None)
        )
        self._reader.share_log(log)
        self._reader.is_kept_here = True
        self._controller = ExternalController(log, self._reader, starter, self._canceller.end, starter.knows)
        return self._controller

    @property
    def is_released(self) -> bool:
        """Whether what this process has started goes on without it, as somebody let the run go."""
        return any(lease.is_released for lease in self._leases)

    @property
    def patience(self) -> Patience:
        """How long this process waits for the store of the run: giving up would leave a run that it keeps."""
        if self._leases:  # it keeps jobs that are paid for
            return PAID_KEEPER
        return FOLLOWER if self._controller is None and self._launched is None else KEEPER

    def keep(self, states: Sequence[ReplicaState]) -> bool:
        """Answer the ends among these states, if this process keeps the run; return whether there are new decisions."""
        if self._controller is None:
            return False
        n_known = len(self._controller.log.entries)
        self._controller.keep(states)
        return len(self._controller.log.entries) > n_known

    def remove(self, on_progress: Callable[[str], None] = lambda words: None) -> None:
        """Delete everything the run left, here and in its store.

        If an earlier removal was interrupted, this one finishes it.

        Args:
            on_progress: gets a few words on the progress, if the removal takes long. Default: nothing is reported.

        Raises:
            RunExistsError: a replica still runs, or is about to be started.
            StoreError: something is left, or the store does not answer.

        Example:
            attach("first-try").remove()
        """
        remove(self, on_progress)

    @cached_property
    def _waiter(self) -> Waiter:
        return Waiter(self._reader, self.cancel, self.keep, lambda: self.patience)

    @cached_property
    def _canceller(self) -> Canceller:
        return Canceller(self._reader, lambda: self.record.created_at, self._tell)

    @staticmethod
    def _tell(words: str) -> None:
        print(f"replicas: {words}", file=sys.stderr)

    @cached_property
    def _display(self) -> Display:
        return Display(self)

    def _settle(self) -> None:
        """The run has ended: whoever goes on finds that the cells say so."""
        if self.at_exit is not None:
            atexit.unregister(self.at_exit)
        for lease in self._leases:
            lease.end()
        if "_display" in self.__dict__:
            self._display.settle()

    def _view(self) -> View | None:
        return open_view(self.run_id) if self.shows_progress else None
