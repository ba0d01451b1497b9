"""Loads the state of a replica from the log: the newest usable snapshot, and the means of the entries after it.

A replica does this when it begins, when it has fallen behind, and when its state is not the state of the log. At the
very beginning of a run, one replica stores its model as the first snapshot.

No seal is skipped or deleted, and snapshots exist only at multiples of `snapshot_every`. So the end of the log is found
without a listing of keys.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from diloco.errors import DivergenceError, QuorumTimeoutError
from diloco.rendezvous.contribution import StepAccount
from diloco.rendezvous.early_end import apply_recorded_end, apply_sealed_end
from diloco.rendezvous.envelope import BadRecordError, check_signed, reading, typed, unproven_fields
from diloco.rendezvous.first_snapshot import FirstSnapshot
from diloco.rendezvous.frames import READ_TRIES, Seal
from diloco.rendezvous.keys import watch_prefix
from diloco.rendezvous.mean import Reducer
from diloco.rendezvous.retrying_store import backoff
from diloco.rendezvous.round import Context, EntryState
from diloco.rendezvous.seal import Sealer, SealLog
from diloco.rendezvous.snapshot import SnapshotPointer, get_parts
from diloco.rendezvous.training_state import Arrays, check_agreement, differing_frozen

log = logging.getLogger(__name__)

AGREEMENT_TRIES = 3 * READ_TRIES
"""The number of wrong readings of the agreement after which a replica continues without it, because no other copy
exists.
"""


@dataclass(frozen=True, slots=True)
class RestoredWork:
    """The work of an earlier attempt of this rank, from a checkpoint or from the store.

    Example:
        replayer.begin(RestoredWork(12, progress, uncounted_since=[10]))
    """

    position: int
    """The next entry that the earlier attempt would have applied."""
    progress: Any
    """The live work of the earlier attempt: its distance from the anchor."""
    uncounted_since: Sequence[int]
    """The entry at which the live work of each fragment began."""


class SnapshotReader:
    """Loads snapshots into the training state, and stores the first one if no other replica has.

    Args:
        context: the services of the rendezvous.
        may_offer: True if this replica may store its model as the first snapshot.

    Example:
        entry = SnapshotReader(context).load(above=-1)
    """

    def __init__(self, context: Context, *, may_offer: bool = True) -> None:
        self._context = context
        self._store = context.store
        self._keys = context.keys
        self._me = context.me
        self._training = context.training
        self._first_snapshot = FirstSnapshot(context, self._load_newest_of) if may_offer else None
        """None once a snapshot was loaded. After that, the state of this process is no longer its own model."""
        self._start: SnapshotPointer | None = None
        """The pointer of the first snapshot, once its agreement was found to fit this replica."""
        self._misfits: set[int] = set()
        """Entries whose snapshots can be read but do not fit this model."""

    def load(self, above: int) -> int | None:
        """Load the newest usable snapshot, and return its entry: the next entry to apply.

        Args:
            above: load only a snapshot after this entry. -1: load any snapshot, and wait until there is one.

        Returns:
            The entry. None: there is no such snapshot, and nothing has changed.

        Raises:
            QuorumTimeoutError: no snapshot could be read in `round_timeout_s`.
            ContributionError: this replica does not fit the run: see `check_agreement` and `check_signed`.
        """
        context, limits = self._context, self._context.limits
        began, pauses = context.clock(), backoff(context.rng)
        while True:
            knows_start = self._find_start()
            head, every = self._head(max(above, self.first)), context.snapshot_every
            for entry in range(head - head % every, max(above, self.first - 1), -every) if knows_start else ():
                pointer = self._start if entry == self.first else self._pointer(entry)  # newest first
                if pointer is None:
                    continue
                number = 0 if entry == self.first else entry
                arrays = get_parts(self._store, self._keys, number, pointer, context.proof)
                if arrays is None:
                    continue
                self._first_snapshot = None
                if self._took(entry, pointer, arrays):
                    # the seal with an early end may be before this snapshot, so this replica never reads it
                    if entry != self.first:
                        apply_recorded_end(context.plan, self._store, self._keys, context.proof)
                    context.standstill.end()
                    return entry
                # a snapshot that did not fit has already replaced the state, so any other snapshot is better
                above = -1
            if above >= 0:
                return None
            waited_s = context.clock() - began
            if knows_start and self._start is None and waited_s >= limits.takeover_after_s:
                self._check_key(is_alone=True)
            if self._first_snapshot is not None and self._first_snapshot.store_if_due():
                continue
            if waited_s > limits.round_timeout_s:
                raise QuorumTimeoutError(
                    f"Rank {self._me.rank} found no snapshot of run {self._keys.run_id!r} that can be read in "
                    f"{limits.round_timeout_s:g} s."
                )
            if context.proof.is_signed and self._store.count_misreads(self._keys.snapshot(0)) >= READ_TRIES:
                context.standstill.look_at_start(began)
            context.members.check_abort()
            context.wait(next(pauses), [watch_prefix(self._keys.snapshot(0))])

    @staticmethod
    def _load_newest_of(other: Context) -> int | None:
        """Load the newest snapshot of another run into the training state, and return its entry."""
        return SnapshotReader(other, may_offer=False).load(-1)

    def _took(self, entry: int, pointer: SnapshotPointer, arrays: Arrays) -> bool:
        """Load the arrays of a snapshot, and return True if they are the state that its pointer names."""
        try:
            with reading("snapshot of this model"):
                self._training.load(arrays)
        except BadRecordError as error:
            if entry not in self._misfits:
                log.warning("rank %s: %s (%s)", self._me.rank, error, self._keys.snapshot(entry))
            self._misfits.add(entry)
            return False
        return pointer.state == self._context.state_digests()

    def _head(self, entry: int) -> int:
        """Return the first entry without a seal, from `entry` on. A stale answer may make the result too early."""

        def is_sealed(entry: int) -> bool:
            return self._store.peek(self._keys.seal(entry), size=0) is not None

        sealed, step = entry - 1, 1
        while is_sealed(sealed + step):
            sealed += step
            step *= 2
        while step > 1:
            step //= 2
            if is_sealed(sealed + step):
                sealed += step
        return sealed + 1

    def _pointer(self, entry: int) -> SnapshotPointer | None:
        """Return the pointer of a snapshot. None: there is none, or it is damaged."""
        key = self._keys.snapshot(entry)
        for _ in range(READ_TRIES):
            data = self._store.peek(key)
            if data is None:
                return None
            with suppress(BadRecordError):
                return SnapshotPointer.parse(data, key, self._context.proof)
            self._store.record_misread(key, data)
        return None

    @property
    def first(self) -> int:
        """The first entry of this log. 0 if it is not known yet."""
        return 0 if self._start is None else self._start.first

    @property
    def is_author(self) -> bool:
        """True if this process has written the first snapshot of the log. False if that is not known yet."""
        return self._start is not None and self._start.nonce == self._me.nonce

    def _find_start(self) -> bool:
        """Read the pointer of the first snapshot, and compare its agreement with the agreement of this replica, once.
        Return False if it cannot be read yet.

        A damaged agreement does not end a run whose other snapshots are good. The digests of a snapshot also show
        whether it fits.

        Raises:
            ContributionError: this replica does not fit the run, or does not have the run's key.
        """
        mine = self._training.agreement()
        if self._start is None and (start := self._pointer(0)) is not None:
            run_id, rank = self._keys.run_id, self._me.rank
            check_agreement(mine, start.agreement, run_id=run_id, author=start.rank, rank=rank)
            self._start = start
            if differing := differing_frozen(mine, start.agreement):
                log.warning(
                    "rank %s: %s has other values than at rank %s, and so have %d frozen parameters and buffers in "
                    "all. Load the same weights in all replicas, or use the same seed: these tensors are not sent.",
                    self._me.rank, differing[0], start.rank, len(differing),
                )  # fmt: skip
        if self._start is None and self._store.count_misreads(self._keys.snapshot(0)) >= READ_TRIES:
            self._check_key(is_alone=False)
        return self._start is not None or self._store.count_misreads(self._keys.snapshot(0)) >= AGREEMENT_TRIES

    def _check_key(self, *, is_alone: bool) -> None:
        """If the agreement cannot be read, find out whether a missing run key of this replica is the reason.

        The agreement may also be damaged, or another writer may have overwritten it.

        Args:
            is_alone: True if no later snapshot can be proven either. Only then is a replica with a key refused.

        Raises:
            ContributionError: the agreement names another key.
        """
        mine = self._training.agreement().get("signed")
        if mine is not None and not is_alone:
            return
        data, theirs = self._store.peek(self._keys.snapshot(0)), mine
        with suppress(BadRecordError), reading("agreement"):
            theirs = mine if data is None else typed(dict, unproven_fields(data)["contract"]).get("signed")
        check_signed(theirs, mine)


class LogReplayer:
    """Restores this replica's training state from the log, and keeps its position in the log.

    It loads the newest snapshot and applies the means of the entries after it. In a usual round it does nothing: the
    round runner applies the entry and advances the position.

    Args:
        context: the services of the rendezvous.
        seals: the seals of the run.
        reducer: reads or computes means.
        sealer: raises an error when an entry takes too long.
        account: gets the decisions of the passed entries.

    Example:
        replayer = LogReplayer(context, seals, reducer, sealer, account)
        replayer.begin()
    """

    def __init__(
        self, context: Context, seals: SealLog, reducer: Reducer, sealer: Sealer, account: StepAccount
    ) -> None:
        self.position = 0
        """The next entry to apply."""
        self.is_reloaded = False
        """True if the state was taken from the log since the last result of a round."""
        self.n_diverged = 0
        """The number of entries in a row at which the anchor differed from the seal's, even after a reload."""
        self._context = context
        self._training = context.training
        self._seals = seals
        self._reducer = reducer
        self._sealer = sealer
        self._account = account
        self._reader = SnapshotReader(context)

    @property
    def first(self) -> int:
        """The first entry of this log. A run that continues from a snapshot of another run does not begin at 0."""
        return self._reader.first

    @property
    def is_author(self) -> bool:
        """True if the log begins with the model of this process."""
        return self._reader.is_author

    def begin(self, restored: RestoredWork | None = None) -> None:
        """Load the newest snapshot, or agree on the first anchor, and set the live parameters accordingly.

        Args:
            restored: the work of an earlier attempt of this rank. Work that no seal has counted since is kept.
        """
        entry = self._reader.load(-1)
        assert entry is not None  # with -1, the call waits until there is a snapshot
        self.position = entry
        self._account.begin_at(entry)
        if restored is None:
            self._training.resume(None)
        else:
            self._replay(until=restored.position)
            self._account.uncounted_since = list(restored.uncounted_since)
            verdicts = self._account.resolve_passed(restored.position, self.position)
            verdicts = self._account.give_up_old(verdicts, restored.progress, self.position)
            self._training.resume(restored.progress, verdicts)
        self.read_newest_seal()

    def go_back(self, position: int) -> None:
        """Continue from an earlier position, after the caller has loaded the training state of that position.

        Args:
            position: the next entry to apply.
        """
        self.position = position
        self._account.begin_at(position)
        self.read_newest_seal()

    def reload(self, above: int = -1) -> bool:
        """Load the state from the log, at least up to the current position, and keep the work that no mean contains.

        Args:
            above: do this only if there is a snapshot after this entry. -1: do it in any case.

        Returns:
            True if the state was loaded. The position may be later than before.
        """
        before, anchors = self.position, self._training.anchors_now()
        entry = self._reader.load(above)
        if entry is None:
            return False
        self.position = entry
        self._replay(until=before)
        account = self._account
        verdicts = account.resolve_passed(before, self.position)
        self._training.follow(anchors, verdicts, partly=account.counted_in_flight(verdicts))
        self.is_reloaded = True
        if self.position != before:
            account.pending = None
            self.read_newest_seal()
        return True

    def reload_diverged(self, entry: EntryState, seal: Seal) -> None:
        """Load the state from the log, because this replica's anchor differs from the anchor that a seal names.

        Args:
            entry: the open entry.
            seal: its seal.

        Raises:
            DivergenceError: the anchor differs at two entries in a row, even after the reload.
        """
        self.reload()
        if self.position != entry.index or self._training.digest(entry.fragment) == seal.anchor:
            self.n_diverged = 0
            return
        self.n_diverged += 1
        if self.n_diverged >= 2:
            raise DivergenceError(
                f"Rank {self._context.me.rank}, round {entry.index + 1}: the anchor of this replica differs from the "
                f"anchor of ranks {', '.join(map(str, sorted(seal.replicas)))}, even after loading it from the store. "
                "Use the same version and the same outer optimizer on the same kind of processor in all replicas."
            )

    def read_newest_seal(self) -> None:
        """Read the seal of the last applied entry. It names the replicas that are expected in the next round."""
        is_first = self.position == self._reader.first
        self._context.members.seal = None if is_first else self._seals.read_seal_or_none(self.position - 1)

    def _replay(self, until: int) -> None:
        """Apply the means of the log to the anchor, up to a position.

        If a mean is missing and a newer snapshot exists, load that, which may lead beyond the position.

        Args:
            until: the position, as the next entry to apply.
        """
        context = self._context
        pauses = context.pauses()
        entry: EntryState | None = None
        while self.position < until:
            if entry is None or entry.index != self.position:
                entry = EntryState.begin(context, self.position)
            seal = self._seals.seal(entry.index)
            mean = self._reducer.collect(entry, seal) if seal is not None else None
            if mean is not None and seal is not None:
                apply_sealed_end(seal, entry.index, context.plan, context.store, context.keys, context.proof)
                self._training.replay(entry.index, mean)
                self.position += 1
            elif self._sealer.is_stuck(entry, seal) and (jumped := self._reader.load(entry.index)) is not None:
                self.position = jumped
            else:
                self._sealer.check_time(entry, seal)
                context.members.check_abort()
                context.wait(next(pauses), ())
