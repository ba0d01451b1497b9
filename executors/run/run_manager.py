"""Does the work of a `Run` in this process: waits, renews leases, restarts, cancels, stops and adds replicas."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from executors.backend import JobsOfRun
from executors.errors import BackendError, StoreError
from executors.notices.notifier import Notifier, NotifierSpec
from executors.patience import CONTROLLER, FOLLOWER, PAID_CONTROLLER, OutageTolerance
from executors.protocol import BY_USER, Outcome, ServerlessExecutor
from executors.restarts.decision_log import DecisionLog
from executors.restarts.lease import LeaseHolder
from executors.run.canceller import Canceller
from executors.run.external_controller import ExternalController
from executors.run.launch_starter import LaunchStarter
from executors.run.removal import withdraw_jobs
from executors.run.waiter import Waiter
from executors.settings.run_spec import RunSpec, StartSpec
from executors.status import ReplicaState, RunStatus
from executors.store.parallel import within
from executors.view.notebook import Display, in_notebook
from executors.view.progress import View, open_view
from executors.view.run_view import RunView

if TYPE_CHECKING:  # replicas are added to few runs, so the module is imported when it is needed
    from executors.run.addition import AdditionRequest

UPDATE_S = 10.0  # the time that `add` waits for the store after its replicas were started


# More than 20 methods: this process waits, ends, restarts, extends and notifies. All of that uses the same leases, and
# the same notes about the end of the run.
class RunManager:
    """Waits for one run, and ends, restarts or extends it from this process. `Run` is its public part.

    Args:
        view: the view that reads the run.
        is_launcher: True if this process launched the run.

    Example:
        manager_of(attach("first-try")).tolerance
    """

    at_exit: Callable[[], None] | None = None
    """Called when this process exits, unless it has waited for the end of the run, or has ended the run."""
    n_withdrawn = 0
    """The number of jobs in a queue that the last `cancel` of the whole run deleted."""
    shows_progress = False
    """True if `wait` and `as_completed` draw the progress of the run."""

    def __init__(self, view: RunView, *, is_launcher: bool = False) -> None:
        self.view = view
        self._is_launcher = is_launcher
        self._leases: tuple[LeaseHolder, ...] = ()
        self._controller: ExternalController | None = None
        self._notifier: Notifier | None = None

    def wait(self, timeout: float | None = None, *, n: int | None = None) -> bool:
        """Wait until replicas have ended; see `Run.wait`.

        Args:
            timeout: the longest wait, in seconds. None: no limit.
            n: the number of replicas whose end is waited for. None: all.

        Raises:
            ValueError: the run does not have `n` replicas.
            StoreError: the store did not answer for longer than `tolerance`.
        """
        view = self.view
        if n is not None and not 1 <= n <= len(view.ranks):
            raise ValueError(f"Run {view.run_id!r} has {len(view.ranks)} replicas, got n={n}.")
        try:
            is_over = self._waiter.wait(n, timeout, self._progress_view())
        except StoreError as error:
            if ended := self.end_refused(error):
                error.add_note(ended)
            raise
        if is_over and n in (None, len(view.reader.records.ranks)):
            self._note_end()
        return is_over

    def as_completed(self) -> Iterator[Outcome]:
        """Yield the outcome of each replica as soon as it has ended; see `Run.as_completed`."""
        yield from self._waiter.as_completed(self._progress_view())
        self._note_end()

    def end_early(self, now: RunStatus, option: str) -> str | None:
        """End the run if a replica failed before the first round, and the launch asked for that.

        Args:
            now: the state of the run.
            option: the option that ends the run, as the caller's users write it.

        Returns: a sentence for the user, once. None: there is nothing to report.
        """
        return self._waiter.end_early(now, option)

    def show(self) -> None:
        """Show the run in a cell of a notebook; see `Run.show`."""
        if in_notebook():
            self._display.show()
        else:
            self._warn(
                "Run.show() draws in a notebook. Elsewhere use launch(…, progress=True), or the command "
                f"`replicas wait {self.view.run_id}`."
            )

    def end_refused(self, error: BaseException) -> str:
        """End the jobs of an attached run at their services, after the store has refused access permanently.

        The store also refuses the replicas, because they have the same credentials. They cannot exchange their work or
        write a result, so they would cost money for nothing.

        Args:
            error: the reason why this process can no longer watch the run.

        Returns: what was ended, and what may still run. Empty if nothing had to be done.

        Example:
            print(manager_of(run).end_refused(error))
        """
        if not self._leases or not isinstance(error, StoreError) or not error.refusal:
            return ""
        view = self.view
        if not view.placements.ends_jobs:
            return ""
        # This comes first, because a renewed lease tells the containers to continue.
        for lease in self._leases:
            lease.end()
        ended = view.placements.end_jobs(JobsOfRun(view.run_id, view.store.url, view.record.created_at), self._warn)
        if not ended.is_complete:
            return ended.what_is_left
        jobs = f"{ended.n_ended} job{'s' * (ended.n_ended != 1)}"
        return f"Its {jobs} were ended at the service, because replicas cannot use a store that refuses them."

    def finish_cancel(self) -> None:
        """End the replicas that `canceller.request` has marked. Unlike `cancel`, it adds no order to the log."""
        self.canceller.end(BY_USER)
        self._note_end()

    def cancel(self, ranks: Sequence[int] | None = None) -> None:
        """Cancel some replicas, or all that still run; see `Run.cancel`.

        Args:
            ranks: the ranks. None: all.

        Raises:
            BackendError: a service did not end some jobs.
            ValueError: the run has no such rank.
        """
        self.canceller.cancel(None if ranks is None else [self.view.check_rank(rank) for rank in ranks])
        if ranks is not None:
            return
        self._note_end()
        try:
            self.n_withdrawn = self.canceller.n_withdrawn + withdraw_jobs(self.view)
        except BackendError as error:  # the replicas were cancelled, so this must not look like a failed cancel
            self._warn(
                f"{self.view.run_id} was cancelled. It is not known whether a queue still holds jobs of it: {error}"
            )

    def stop(self, within_s: float, wait: Callable[[float], bool] | None = None) -> None:
        """Let the replicas finish their round, and end the run; see `Run.stop`.

        Args:
            within_s: how long replicas have to finish their round, in seconds.
            wait: the function that waits for the end of the run. Its argument is the longest wait in seconds, and it
                returns False if the run still runs after that. None: `wait` of this manager.

        Raises:
            ValueError: `within_s` is not a time.
        """
        self.canceller.stop(within_s, wait or self.wait)
        self._note_end()

    def add(
        self, executor: str | ServerlessExecutor, asked: AdditionRequest, on_progress: Callable[[str], None]
    ) -> list[int]:
        """Start more replicas of the run, and return their ranks. See `Run.add`.

        Args:
            executor: the name of a backend, or an executor.
            asked: the number of replicas, and the values that replace the launch's.
            on_progress: called with a few words on the progress of the start.
        """
        from executors.run.addition import add_replicas

        added = add_replicas(self.view, executor, asked, on_progress)
        ranks = list(added.start_spec.ranks)
        try:
            if not added.start_spec.spec.settings.detach:
                self.restart_here([added.start_spec], added.lease)
            with contextlib.suppress(StoreError):  # the last list that this process read does not have the new ranks
                within(UPDATE_S, self.view.reader.records.update, self.view.store.url)
        except KeyboardInterrupt:  # the caller would not learn these ranks, and could not end them
            self.cancel(ranks)
            raise
        return ranks

    def restart_here(
        self,
        start_specs: Sequence[StartSpec],
        lease: LeaseHolder | None,
        say: Callable[[str], None] | None = None,
        *,
        log: DecisionLog | None = None,
    ) -> ExternalController:
        """Let this process restart replicas whose supervisors have ended. It does so while it waits for the run.

        A second call adds ranks to the first one.

        Args:
            start_specs: the values that start the ranks again. Ranks without such values are left alone.
            lease: the lease of the replicas, which ends with the run. None: they need no lease.
            say: called with a sentence on each start that failed. None: the sentences go to stderr.
            log: the decision log of the run, as far as the caller has read it. None: it is read from the beginning.

        Returns: the controller that decides.
        """
        view = self.view
        self._leases += () if lease is None else (lease,)
        if self._controller is not None:
            self._controller.starter.learn(start_specs)
            return self._controller
        starter = LaunchStarter(view.placements, start_specs, say or self._warn)
        log = log or DecisionLog(
            view.store, view.run_id, key=next((start_spec.spec.key for start_spec in start_specs), None)
        )
        view.reader.share_log(log)
        view.reader.supervisors.is_kept_here = True
        self._controller = ExternalController(log, view.reader, starter, self.canceller.end, starter.knows)
        return self._controller

    def notify_here(self, spec: RunSpec) -> None:
        """Send notifications from a process beside this one, for as long as this process watches the run.

        Args:
            spec: the run, with the URLs. Without URLs, nothing is started.
        """
        if spec.notify and self._notifier is None:
            self._notifier = Notifier(NotifierSpec.of(spec), has_output=True)
            self._notifier.start()

    def stop_notifying(self) -> None:
        """Let the notifications that wait be sent, and no further ones. The process that sends them ends by itself."""
        if self._notifier is not None:
            self._notifier.close()
            self._notifier = None

    @property
    def is_released(self) -> bool:
        """True if the replicas that this process started continue without it, because a user released it."""
        return any(lease.is_released for lease in self._leases)

    @property
    def tolerance(self) -> OutageTolerance:
        """The longest wait of this process for the run's store. A process that renews leases waits longest."""
        if self._leases:  # this process is responsible for paid jobs
            return PAID_CONTROLLER
        return CONTROLLER if self._controller is not None or self._is_launcher else FOLLOWER

    def advance(self, states: Sequence[ReplicaState]) -> bool:
        """Decide on restarts for the ends among these states, if this process is responsible for restarts.

        Args:
            states: the states of all replicas, as the last look found them.

        Returns: True if there are new decisions, so that another look is due.
        """
        if self._notifier is not None:
            self._notifier.keep()
        if self._controller is None:
            return False
        n_known = len(self._controller.log.entries)
        self._controller.advance(states)
        return len(self._controller.log.entries) > n_known

    @cached_property
    def canceller(self) -> Canceller:
        """Ends replicas of the run, and remembers the result of the last cancel."""
        return Canceller(self.view.reader, lambda: self.view.record.created_at, self._warn)

    @cached_property
    def _waiter(self) -> Waiter:
        return Waiter(self.view.reader, self.cancel, self.advance, lambda: self.tolerance)

    @cached_property
    def _display(self) -> Display:
        return Display(self.view)

    def _progress_view(self) -> View | None:
        return open_view(self.view.run_id) if self.shows_progress else None

    def _note_end(self) -> None:
        """Release everything that is only needed during the run: the warning at the exit, the leases and the
        notebook cells.
        """
        if self.at_exit is not None:
            atexit.unregister(self.at_exit)
        for lease in self._leases:
            lease.end()
        self.stop_notifying()
        if "_display" in self.__dict__:
            self._display.settle()

    @staticmethod
    def _warn(text: str) -> None:
        print(f"replicas: {text}", file=sys.stderr)
