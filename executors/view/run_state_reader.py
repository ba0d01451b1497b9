"""Reads the states of the replicas of a run.

Each look needs one list request to the store and one question to the backend.

The list shows which records are new, and only these are read. ADR 0019 has the reasons.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from executors.attempt import Attempt
from executors.attempt.handles import kept_handles
from executors.attempt.pauses import pauses
from executors.backend import Observation, PendingReplica, SupervisorStatus
from executors.errors import BackendError, CorruptObjectError, StoreError, UnknownHandleError, UnwritableStoreError
from executors.process import has_ended
from executors.protocol import REASONS, Outcome, ReplicaStatus, as_status
from executors.registry.run_index import reference
from executors.registry.run_placements import RunPlacements
from executors.restarts.decision_log import Decision, DecisionLog
from executors.restarts.lease import has_lease_ended
from executors.restarts.restart_view import RestartView
from executors.status import INSTALLING, ReplicaState, RunStatus, name_ranks
from executors.store import Store
from executors.store.inventory import Inventory
from executors.store.parallel import at_store
from executors.store.run_key import lacks_key
from executors.store.url import is_near
from executors.task.record import RunRecord
from executors.view.heartbeats import Heartbeats
from executors.view.installations import Installations
from executors.view.service_reasons import ServiceReasons

FAR_PAUSES_S = (0.25, 4.0)  # without these pauses, watching 64 replicas for an hour would need 60,000 requests
RECENT_S = 0.2
LEASE_LOOK_S = 10.0  # between two reads of a lease, because another process may take it over at any time
ADDING_S = 60.0  # the longest time from the record of added ranks to the first record of their attempts
T = TypeVar("T")
R = TypeVar("R")


# More than 20 methods: outcomes, handles and states of replicas come from one list of the store and one question to the
# backend, and each may correct the others in the same look. In separate classes, each would hold the other two.
class RunStateReader:
    """Reads the states of a run's replicas, and remembers everything that it has read.

    An ended replica stays ended until a newer attempt is found.

    Args:
        store: the store of the run.
        run_id: the id of the run.
        record: the record of the run.
        placements: the backends of the ranks.
        handles: the handles of the launch, in rank order. None: they are read from the store.

    Example:
        reader = view_of(attach("first-try")).reader
        print([state.status for state in reader.look()])
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        record: RunRecord,
        placements: RunPlacements,
        handles: Sequence[Any] | None = None,
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.record = record
        self.placements = placements
        self._ranks: Sequence[int] = range(record.world_size)
        self.is_near = is_near(store.url)
        self._inventory = Inventory()
        self._merging = threading.Lock()
        self._updated_at = -math.inf
        self._handles: dict[int, tuple[int | None, Any]] = {rank: (0, each) for rank, each in enumerate(handles or ())}
        self._launches: dict[int, Mapping[int, Any]] = {}
        """The handles of launches that wrote all handles into one object, by the number of the attempt."""
        self._outcomes: dict[int, Outcome] = {}
        self._unrecorded: set[int] = set()
        """Ranks whose end is known but could not be recorded. The next look tries again."""
        self._problems: dict[int, Outcome] = {}
        self._heartbeats = Heartbeats()
        self._installations = Installations()
        self.is_kept_here = False
        """True if this process restarts replicas whose supervisors are gone."""
        self._restarts = RestartView(
            store, run_id, record, self.has_live_controller, self.has_ended_with_launcher, reference
        )
        self._permanent: set[int] = set()
        self._judged: dict[tuple[int, int, int], bool] = {}
        """True if an `outcome.json` without a signed original is forged, by rank, attempt and size of the object."""
        self._judged_starts: set[tuple[int, int, str]] = set()
        """Rank, attempt and name of each intent or claim that is not signed with the run's key."""
        self._lease_read_at = -math.inf
        self._lease_ended = False
        self.reasons = ServiceReasons()

    @property
    def inventory(self) -> Inventory:
        """The list of the replicas' records at the last look."""
        return self._inventory

    @property
    def ranks(self) -> Sequence[int]:
        """The launched ranks and the ranks that were added before the last look."""
        return self._ranks

    def backend(self, rank: int) -> str:
        """Return the name of the backend that has a rank."""
        return self.placements.name_at(rank)

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait between two looks. They are longer for a remote store, to save requests."""
        return pauses() if self.is_near else pauses(*FAR_PAUSES_S)

    def look(self, ranks: Sequence[int] | None = None) -> list[ReplicaState]:
        """Return the states of replicas, without the numbers that they report.

        A replica that waits for a restart is pending.

        A look makes one list request, reads new outcomes and handles, and asks the backend once for all replicas
        without an outcome. If a replica has failed, it also reads the new entries of the decision log.

        Args:
            ranks: the ranks. None: all ranks.
        """
        while self._unrecorded:
            self._outcomes.pop(self._unrecorded.pop(), None)
        seen = [replace(state, backend=self.backend(state.rank)) for state in self._look(ranks)]
        states = self._restarts.with_restarts(seen, self._ends())
        permanent = {state.rank for state in states if state.restart.is_permanent}
        self._permanent = permanent | self._permanent - {state.rank for state in states}
        return [self._never_started(state) for state in states] if self._has_no_launcher() else states

    def _has_no_launcher(self) -> bool:
        """Return True if the launching process is known to have died before it started any replica."""
        launcher = self.record.launcher
        if self._inventory.records or launcher is None or not has_ended(launcher):
            return False
        # On other backends, a replica may run before it has a record.
        with contextlib.suppress(BackendError):
            return self.placements.knows_attempts
        return False

    def _never_started(self, state: ReplicaState) -> ReplicaState:
        """Return a pending replica as failed, because its launcher died. No outcome is written to the store."""
        if state.status is not ReplicaStatus.PENDING:
            return state
        who = f"the process {self.record.launcher_pid} of {self.record.created_by}"
        error = f"Replica {state.rank} was never started: {who}, which launched the run, has ended."
        outcome = self.attempt(state.rank).new_outcome(
            ReplicaStatus.FAILED, "start_failed", error=error, finished_at=self.record.created_at
        )
        return replace(state, status=outcome.status, outcome=outcome)

    def status(self, states: Sequence[ReplicaState]) -> RunStatus:
        """Return the state of the run.

        Args:
            states: the states of all its replicas.
        """
        record, restarts = self.record, self._restarts
        return RunStatus(
            self.run_id,
            self.placements.backend_name,
            states,
            self.count_joined(),
            record.settings.min_replicas,
            restarts.describe_decisions(self._ends()),
            restarts.restarts_by_reason,
            self._forged(),
            self._forged_starts(),
            lacks_key(self.store.url, self.run_id),
            store_url=self.store.url,
        )

    def about_to_start(self) -> str | None:
        """Return a text about replicas that another process will start soon. None if no process will.

        Other methods only see replicas that already have a record.
        """
        self.update()
        if resumed := self._restarts.about_to_start({rank: self._inventory.newest(rank) for rank in self.ranks}):
            return f"{name_ranks(resumed)} being resumed"
        now = time.time()
        for added in self.placements.additions():
            is_begun = {*added.ranks} & {rank for rank, _, _ in self._inventory.records}
            if not is_begun and -ADDING_S <= now - added.added_at <= ADDING_S and not added.is_orphaned:
                return f"{name_ranks(added.ranks)} being added"
        return None

    def _forged(self) -> list[tuple[int, int]]:
        """Return the attempts whose `outcome.json` is not signed with the run's key, as of the last look."""
        found = sorted((*key, size) for key, size in self._inventory.dubious.items())
        new = [each for each in found if each not in self._judged]
        attempts = [Attempt(self.store, self.run_id, *each[:2]) for each in new]

        def is_forged(attempt: Attempt) -> bool | None:
            with contextlib.suppress(StoreError):  # the store did not answer; the next look asks again
                return attempt.has_forged_outcome
            return None

        answers = zip(new, self.map(is_forged, attempts), strict=True)
        self._judged.update({each: answer for each, answer in answers if answer is not None})
        return [each[:2] for each in found if self._judged.get(each)]

    def _forged_starts(self) -> list[tuple[int, int]]:
        """Return the attempts whose intent or claim is not signed with the run's key, as of the last look."""
        found = self._inventory.unmatched
        new = [each for each in sorted(found) if each not in self._judged_starts]

        def is_forged(each: tuple[int, int, str]) -> bool:
            rank, number, name = each
            with contextlib.suppress(StoreError):  # the next look asks again
                # A list takes a while, so it may show the copy and not yet the signed record, although the signed
                # record is created first.
                return not Attempt(self.store, self.run_id, rank, number).has(f"{name}.json")
            return False

        self._judged_starts |= {each for each, is_one in zip(new, self.map(is_forged, new), strict=True) if is_one}
        return sorted({(rank, number) for rank, number, _ in found & self._judged_starts})

    @property
    def decisions(self) -> Sequence[Decision]:
        """The entries of the decision log that this process has read."""
        return self._restarts.decisions

    def share_log(self, log: DecisionLog) -> None:
        """Share the decision log with another reader of the same run, so that each entry is read once."""
        self._restarts.share_log(log)

    @property
    def is_permanent(self) -> bool:
        """True if, as of the last look, a rank would fail again in the same way if it were restarted."""
        return bool(self._permanent)

    def has_live_controller(self, rank: int) -> bool:
        """Return True if the backend reports that the supervisor of a rank is alive."""
        supervisor = self._supervisor(rank)
        return supervisor is not None and supervisor.is_alive

    def has_ended_with_launcher(self, rank: int) -> bool:
        """Return True if the supervisor of a rank and the launcher of its attached run are known to have ended.

        The rule is the same for all backends. The handle of a local replica names its launcher, and the launcher renews
        a lease for jobs of a service. In a process that watches the run the answer is always False, because this
        process starts the next attempt.

        Args:
            rank: the rank.

        Example:
            reader.has_ended_with_launcher(0)
        """
        supervisor = None if self.is_kept_here else self._supervisor(rank)
        if supervisor is None or supervisor.is_alive:
            return False
        return supervisor.launcher_is_gone or self._has_lease_ended()

    def _has_lease_ended(self) -> bool:
        """Return True if no process renews the lease of an attached run.

        The store is asked again after some seconds.
        """
        now = time.monotonic()
        if now >= self._lease_read_at + LEASE_LOOK_S:
            try:
                self._lease_ended = has_lease_ended(self.store, self.run_id, time.time())
            except StoreError:  # without an answer, the lease counts as renewed; the next look asks again
                return False
            self._lease_read_at = now
        return self._lease_ended

    def _supervisor(self, rank: int) -> SupervisorStatus | None:
        """Return the state of the supervisor of a rank. None: the backend cannot say."""
        with contextlib.suppress(BackendError, CorruptObjectError, UnknownHandleError):
            if (handle := self.handle(rank)) is not None:
                return self.placements.supervisors([PendingReplica(handle, self.attempt(rank).number)])[0]
        return None

    def _ends(self) -> dict[int, Outcome]:
        return {rank: end for rank in self.ranks if (end := self.outcome(rank)) is not None}

    def recorded(self, ranks: Sequence[int] | None = None) -> list[ReplicaState]:
        """Return the states of ranks from the store alone; no backend is asked.

        Args:
            ranks: the ranks. None: all ranks.
        """
        return [self._state(rank, None, "") for rank in self._read(ranks)]

    def _read(self, asked: Sequence[int] | None) -> Sequence[int]:
        """List the records, read the new outcomes, and return the requested ranks. None: all ranks."""
        self.update()
        ranks = self.ranks if asked is None else asked
        over = [each for each in map(self.attempt, ranks) if self._inventory.has(each.rank, each.number, "outcome")]
        self.map(self._keep_outcome, [each for each in over if self.outcome(each.rank) is None])
        return ranks

    def _look(self, asked: Sequence[int] | None) -> list[ReplicaState]:
        ranks = self._read(asked)
        ends = [end for rank in ranks if (end := self.outcome(rank)) is not None]
        for end in self.reasons.ask(ends, self.placements, self.handle):
            self._keep_outcome(self.attempt(end.rank).at(end.attempt))
        waiting = [rank for rank in ranks if self.outcome(rank) is None]
        handles = dict(zip(waiting, self._newest_handles(waiting), strict=True))
        known = (rank for rank, handle in handles.items() if handle is not None and self.problem(rank) is None)
        newest = {rank: self.attempt(rank) for rank in known}
        seen = self._ask_backend(newest, handles) if newest else {}
        ended = [rank for rank, (status, _) in seen.items() if status is not None and status.is_terminal]
        if ended:
            self.update()
            restarted = [rank for rank in ended if self.attempt(rank) != newest[rank]]
            self.map(lambda rank: self._record_reported_end(rank, seen[rank][0]), sorted({*ended} - {*restarted}))
            # A newer attempt was started during the call, so the backend's answer is about the older attempt.
            if restarted:
                others = [rank for rank in ranks if rank not in restarted]
                found = [self._state(rank, *seen.get(rank, (None, ""))) for rank in others]  # the look may find newer
                return sorted([*found, *self._look(restarted)], key=lambda state: ranks.index(state.rank))
        return [self._state(rank, *seen.get(rank, (None, ""))) for rank in ranks]

    def with_reports(self, states: Sequence[ReplicaState]) -> list[ReplicaState]:
        """Return the states with the last heartbeat of each replica, or with the progress of its installation."""

        def with_report(state: ReplicaState) -> ReplicaState:
            has_beat = self._inventory.has(state.rank, state.attempt, "heartbeat")
            attempt = self.attempt(state.rank).at(state.attempt)
            state = self._installations.over(state, attempt, launched_at=self.record.created_at)
            return self._heartbeats.over(state, attempt, has_beat=has_beat)

        return self.map(with_report, states)

    def count_joined(self) -> int:
        """Return the number of ranks that joined the running run by themselves, as of the last look."""
        return len(self._inventory.joined(self.record.world_size) - {*self._ranks})

    def update(self, max_age_s: float = 0.0) -> None:
        """List the replicas' records again, unless the last list is less than `max_age_s` seconds old."""
        if time.monotonic() - self._updated_at >= max_age_s:
            found = Inventory.of(self.store, self.run_id)
            with self._merging:  # a thread with an older list must not remove records that another thread has found
                self._inventory |= found
                added = self._inventory.added(self.record.world_size)
                if added:
                    self.placements.learn(added)
                    placed = {*self.placements.ranks}
                    self._ranks = [*range(self.record.world_size), *(rank for rank in added if rank in placed)]
            self._updated_at = time.monotonic()

    def attempt(self, rank: int) -> Attempt:
        """Return a rank's newest attempt, as of the last look."""
        return Attempt(self.store, self.run_id, rank, self._inventory.newest(rank))

    def outcome(self, rank: int) -> Outcome | None:
        """Return the outcome of a rank's newest attempt, as of the last look. None while the attempt continues."""
        known = self._outcomes.get(rank)
        is_final = known is not None and known.status is ReplicaStatus.SUCCEEDED
        return known if is_final or (known and known.attempt == self._inventory.newest(rank)) else None

    def problem(self, rank: int) -> Outcome | None:
        """Return a substitute outcome for a rank with damaged or forged records. None if the records are sound."""
        found = self._problems.get(rank)
        return found if found is not None and found.attempt == self._inventory.newest(rank) else None

    def handle(self, rank: int, *, insists: bool = False) -> Any:
        """Return the handle of a rank. None if it has no handle yet, or the backend cannot find it now.

        Args:
            rank: the rank.
            insists: True: if the backend cannot answer now, raise BackendError. False, the default: return None.

        Raises:
            CorruptObjectError: the record in the store is not a handle of this backend.
            BackendError: `insists` is True, and the backend cannot say now whether it has a job of this rank.
        """
        _, handle = self._handles.get(rank, (None, None))
        if handle is None:  # not kept, because the launcher may write the handle later
            self.update(RECENT_S)
            handle = self._newest_handle(rank, insists=insists)
        return handle

    def handles(self) -> list[Any]:
        """Return the handles in rank order.

        An entry is None if the rank has no handle, or its handle cannot be read.
        """
        if any(self._handles.get(rank, (None, None))[1] is None for rank in self.ranks):
            self.update()
        return self._newest_handles(self.ranks)

    def launched(self, rank: int) -> list[Attempt]:
        """Return the attempts of a rank that have a log, oldest first, as of the last look."""
        found = [self.attempt(rank).at(number) for number in self._inventory.launched(rank)]
        return found or [self.attempt(rank).at(0)]

    def handle_at(self, attempt: Attempt) -> Any:
        """Return the handle of an attempt. None if it has no handle, or this process cannot read the handle."""
        if attempt.number == self._inventory.newest_launched(attempt.rank):
            return self._readable_handle(attempt.rank)
        number, known = self._handles.get(attempt.rank, (None, None))
        return known if number == attempt.number else attempt.handle(self.backend(attempt.rank))

    def collect_missing(self, ranks: Sequence[int]) -> None:
        """Ask the backend for the outcomes of ended replicas that could not write an outcome themselves.

        Args:
            ranks: the ranks that have ended.
        """
        missing = [rank for rank in ranks if self.outcome(rank) is None and self.problem(rank) is None]
        # A rank that was never started has no handle, and no backend can report on it.
        handles = {rank: handle for rank in missing if (handle := self.handle(rank)) is not None}
        rows = self.placements.collect([*handles.values()]) if handles else []
        for rank, row in zip(handles, rows, strict=True):
            if as_status(row.get("status")).is_terminal:
                self._outcomes[rank] = self._of_row(self.attempt(rank), row)

    def ending(self, state: ReplicaState) -> Outcome:
        """Return the outcome of a replica. If there is none, return a new one with the replica's status."""
        known = None if state.restart.is_awaited else state.outcome or self.outcome(state.rank)
        return known or self.attempt(state.rank).new_outcome(state.status)

    def map(self, act: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call a function for several items, in parallel threads if the run's store is remote."""
        return at_store(self.store, act, list(items))

    def _keep_outcome(self, attempt: Attempt) -> bool:
        """Read and remember the outcome of an attempt. Return False if it has none yet."""
        try:
            outcome = attempt.outcome()
        except CorruptObjectError as error:
            self._problems[attempt.rank] = unreadable(attempt, error)
            return True
        if outcome is not None:
            self._outcomes[attempt.rank] = outcome
        return outcome is not None

    def _newest_handles(self, ranks: Sequence[int]) -> list[Any]:
        newest = {rank: self._inventory.newest_launched(rank) for rank in ranks}
        unread = Counter(number for rank, number in newest.items() if self._handles.get(rank, (None,))[0] != number)
        for number, n in unread.items():
            if number is not None and n > 1 and not self.is_near and number not in self._launches:
                self._launches[number] = kept_handles(self.store, self.run_id, number, self.backend)
        far = [
            rank
            for rank, number in newest.items()
            if number is not None and not self._has_handle(rank, number) and rank not in self._launches.get(number, {})
        ]
        found = dict(zip(far, self.map(self._readable_handle, far), strict=True))
        return [found[rank] if rank in found else self._readable_handle(rank) for rank in ranks]

    def _has_handle(self, rank: int, number: int) -> bool:
        found, handle = self._handles.get(rank, (None, None))
        return handle is not None and found == number

    def _readable_handle(self, rank: int) -> Any:
        try:
            return self._newest_handle(rank)
        except (CorruptObjectError, UnknownHandleError) as error:
            self._problems[rank] = unreadable(self.attempt(rank), error)
            return None

    def _newest_handle(self, rank: int, *, insists: bool = False) -> Any:
        """Return the handle of the rank's newest attempt that was launched. Each handle is read once."""
        launched = self._inventory.newest_launched(rank)
        if launched is None or self._has_handle(rank, launched):
            return self._handles.get(rank, (None, None))[1]
        attempt = self.attempt(rank).at(launched)
        found = self._launches.get(launched, {}).get(rank) or attempt.handle(self.backend(rank))
        if found is None:
            found = self.placements.find_handle(attempt.bare_handle(self.backend(rank)), insists=insists)
            if found is None and (
                outcome := attempt.outcome()
            ):  # the backend has recorded that it could not start the attempt
                self._outcomes[rank] = outcome
        self._handles[rank] = (launched, found)
        return found

    def _ask_backend(
        self, newest: Mapping[int, Attempt], handles: Mapping[int, Any]
    ) -> dict[int, tuple[ReplicaStatus | None, str]]:
        """Return for each replica the status that the backend reports, and a text on the thing that it waits for."""
        replicas = [PendingReplica(handles[rank], attempt.number) for rank, attempt in newest.items()]
        try:
            found = self.placements.observe(replicas)
        except (CorruptObjectError, UnknownHandleError, UnwritableStoreError) as error:
            if len(newest) > 1:  # asking for each replica alone shows which one has the bad record
                each_alone = (self._ask_backend({rank: attempt}, handles) for rank, attempt in newest.items())
                return {rank: seen for alone in each_alone for rank, seen in alone.items()}
            (rank,) = newest
            if isinstance(error, UnwritableStoreError):
                return {rank: (self._keep_unrecorded(rank, error).status, "")}
            self._problems[rank] = unreadable(newest[rank], error)
            return {}
        return {rank: self._note(rank, each) for rank, each in zip(newest, found, strict=True)}

    def _note(self, rank: int, observation: Observation) -> tuple[ReplicaStatus | None, str]:
        if observation.outcome is None:
            return observation.status, observation.doing
        self._outcomes[rank] = observation.outcome
        return observation.outcome.status, ""

    def _record_reported_end(self, rank: int, reported: ReplicaStatus | None) -> None:
        """Record the end of a replica that its backend reports, because the other replicas must know of it."""
        if self.outcome(rank) is not None:
            return
        attempt = self.attempt(rank)
        # A replica writes its outcome before its process ends, so the outcome may be in the store by now.
        if not self._keep_outcome(attempt) and reported is not ReplicaStatus.SUCCEEDED:
            try:
                self._outcomes[rank] = self._record_for(attempt, reported)
            except UnwritableStoreError as error:
                self._keep_unrecorded(rank, error)

    def _keep_unrecorded(self, rank: int, error: UnwritableStoreError) -> Outcome:
        """Return an outcome for this look only, because the store does not accept it."""
        if error.outcome is None:
            raise error
        said = error.outcome.error or ""
        self._outcomes[rank] = found = replace(error.outcome, error=f"{said} It cannot be recorded: {error}".strip())
        self._unrecorded.add(rank)
        return found

    def _record_for(self, attempt: Attempt, reported: ReplicaStatus | None) -> Outcome:
        """Write an outcome from the backend's report. Such a backend does not write outcomes itself."""
        (row,) = self.placements.collect([self.handle(attempt.rank)], timeout=0)
        if reported is not ReplicaStatus.CANCELLED and row.get("reason") not in REASONS:
            return attempt.record_lost(f"{self.backend(attempt.rank)} reports it {reported}")
        return attempt.record(self._of_row(attempt, {**row, "status": reported}))

    def _of_row(self, attempt: Attempt, row: Mapping[str, Any]) -> Outcome:
        """Return the outcome that an executor reports for a replica without an outcome.

        In a signed run it counts as unproven.
        """
        return replace(Outcome.of_row(attempt.rank, attempt.number, row), unproven=self.record.settings.signed)

    def _state(self, rank: int, reported: ReplicaStatus | None, doing: str) -> ReplicaState:
        outcome = self.outcome(rank)
        if outcome is not None:
            return ReplicaState(rank, outcome.attempt, outcome.status, outcome)
        number = self._inventory.newest(rank)
        has_started = self._inventory.has(rank, number, "started")
        status = reported or (ReplicaStatus.RUNNING if has_started else ReplicaStatus.PENDING)
        if not has_started and self._inventory.has(rank, number, "boot"):
            doing = INSTALLING
        if (problem := self.problem(rank)) is not None:
            status = ReplicaStatus.FAILED if self._inventory.has(rank, number, "outcome") else status
            return ReplicaState(rank, number, status, problem, is_readable=False)
        return ReplicaState(rank, number, status, doing=doing)


def unreadable(attempt: Attempt, error: Exception) -> Outcome:
    """Return a substitute outcome for an attempt with damaged records. It is not written to the store.

    Args:
        attempt: the attempt.
        error: the error of reading the record.
    """
    return attempt.new_outcome(ReplicaStatus.FAILED, "lost", error=str(error), finished_at=time.time())
