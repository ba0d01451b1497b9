"""Where a replica's state comes from: the newest usable snapshot, and at the very beginning one replica's model.

Bootstrapping, jumping ahead and taking the state from the log again are the same thing. The head of the log is found
without a listing, because seals are dense and never deleted; pointers exist at multiples of `snapshot_every` alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from diloco.errors import DivergenceError, QuorumTimeoutError
from diloco.rendezvous.contribution import StepAccount
from diloco.rendezvous.early_end import apply_recorded_end, apply_sealed_end
from diloco.rendezvous.envelope import BadRecordError, check_signed, reading, typed, unproven_fields
from diloco.rendezvous.frames import READ_TRIES, Seal
from diloco.rendezvous.keys import folder_of
from diloco.rendezvous.mean import Reducer
from diloco.rendezvous.retrying_store import backoff
from diloco.rendezvous.round import Context, EntryState
from diloco.rendezvous.seal import Sealer, SealLog
from diloco.rendezvous.snapshot import SnapshotPointer, get_parts, put_parts
from diloco.rendezvous.training_state import Arrays, check_agreement, unlike_frozen

log = logging.getLogger(__name__)

AGREEMENT_TRIES = 3 * READ_TRIES
"""How often the agreement is read before a replica goes without: longer than for what has another copy."""


@dataclass(frozen=True, slots=True)
class RestoredWork:
    """What an earlier copy of this rank had."""

    position: int
    progress: Any
    """Its live work, as distances from the anchor."""
    uncounted_since: Sequence[int]
    """By fragment, the entry at which that work began."""


class SnapshotReader:
    """Loads snapshots into the training state."""

    def __init__(self, context: Context, *, may_offer: bool = True) -> None:
        self._context = context
        self._store = context.store
        self._keys = context.keys
        self._me = context.me
        self._training = context.training
        self._may_offer = may_offer
        """False once a snapshot was loaded: uploading parts of a different state would corrupt the first anchor."""
        self._start: SnapshotPointer | None = None
        """The pointer of the first state of the log, whose agreement this replica shares."""
        self._taken_over: int | None = None
        """The entry before which another run's state is, if it was loaded to begin this run with."""
        self._has_first_state = False
        """Whether the state that the run begins with was read from another run."""
        self._misfits: set[int] = set()
        """Entries whose snapshots can be read and not be loaded."""

    def load(self, above: int) -> int | None:
        """Load the newest usable snapshot before an entry after `above`; -1: any, however long it takes.

        Returns: the entry before which the state now is; None: there is no such snapshot, and nothing has changed.
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
                self._may_offer = False
                if self._took(entry, pointer, arrays):
                    if entry != self.first:  # the seal that ended the run may be earlier, and is then never read
                        apply_recorded_end(context.plan, self._store, self._keys, context.proof)
                    context.standstill.end()
                    return entry
                above = -1  # the state from before is lost now
            if above >= 0:
                return None
            waited_s = context.clock() - began
            if knows_start and self._start is None and waited_s >= limits.takeover_after_s:
                self._check_key(is_alone=True)
            turn_s = self._me.rank * limits.takeover_after_s  # by then every lower rank is held to be dead
            if self._may_offer and waited_s >= turn_s and not self._store.exists(self._keys.snapshot(0)):
                self._offer_first_anchor()
                continue
            if waited_s > limits.round_timeout_s:
                raise QuorumTimeoutError(
                    f"Rank {self._me.rank} found no snapshot of run {self._keys.run_id!r} that can be read in "
                    f"{limits.round_timeout_s:g} s."
                )
            if context.proof.is_signed and self._store.count_misreads(self._keys.snapshot(0)) >= READ_TRIES:
                context.standstill.look_at_start(began)
            context.members.check_abort()
            context.wait(next(pauses), [folder_of(self._keys.snapshot(0))])

    def _took(self, entry: int, pointer: SnapshotPointer, arrays: Arrays) -> bool:
        """Load arrays, and return whether they are the state that their pointer promises."""
        try:
            with reading("snapshot of this model"):
                self._training.load(arrays)
        except BadRecordError as error:
            if entry not in self._misfits:
                log.warning("rank %s: %s (%s)", self._me.rank, error, self._keys.snapshot(entry))
            self._misfits.add(entry)
            return False
        return pointer.state == self._digests()

    def _digests(self) -> tuple[str, ...]:
        return tuple(self._training.digest(f) for f in range(len(self._context.layouts)))

    def _head(self, entry: int) -> int:
        """Return the first entry without a seal, at least `entry`; perhaps an earlier one."""

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
        """The first entry of this log, as far as is known."""
        return 0 if self._start is None else self._start.first

    @property
    def is_author(self) -> bool:
        """Whether the first state of the log is this process's, as far as is known."""
        return self._start is not None and self._start.nonce == self._me.nonce

    def _find_start(self) -> bool:
        """Read where the log begins and compare the agreements, once; return False while that cannot be seen.

        An agreement that has rotted is not the end of a run whose snapshots are well: digests show misfits, too.

        Raises: ContributionError: names the first difference, or says that this replica has not the run's key.
        """
        mine = self._training.agreement()
        if self._start is None and (start := self._pointer(0)) is not None:
            run_id, rank = self._keys.run_id, self._me.rank
            check_agreement(mine, start.agreement, run_id=run_id, author=start.rank, rank=rank)
            self._start = start
            if unlike := unlike_frozen(mine, start.agreement):
                log.warning(
                    "rank %s: %s has other values than at rank %s, and stays so: nobody sends it (%d such). "
                    "Load the same weights, or seed all replicas alike; what is trained is sent.",
                    self._me.rank, unlike[0], start.rank, len(unlike),
                )  # fmt: skip
        if self._start is None and self._store.count_misreads(self._keys.snapshot(0)) >= READ_TRIES:
            self._check_key(is_alone=False)
        return self._start is not None or self._store.count_misreads(self._keys.snapshot(0)) >= AGREEMENT_TRIES

    def _check_key(self, *, is_alone: bool) -> None:
        """Distinguish a replica without the run's key from a damaged agreement. Nothing else depends on that record.

        Args:
            is_alone: no later snapshot is proven either. Until then, no replica with a key is refused: another writer
                may have overwritten the agreement.
        """
        mine = self._training.agreement().get("signed")
        if mine is not None and not is_alone:
            return
        data, said = self._store.peek(self._keys.snapshot(0)), mine
        with suppress(BadRecordError), reading("agreement"):
            said = mine if data is None else typed(dict, unproven_fields(data)["contract"]).get("signed")
        check_signed(said, mine)

    def _offer_first_anchor(self) -> None:
        """Put one's own initial model under one's own nonce; the pointer in the store then decides.

        A run that goes on from another begins with the newest state of that.
        """
        origin = self._context.origin
        if origin is not None and self._taken_over is None:
            limits = replace(self._context.limits, round_timeout_s=self._context.limits.grace_s)  # nothing comes there
            # A plan of its own: if that run was stopped, this replica alone would read of it, and end too early.
            keys, plan = replace(self._keys, run_id=origin), replace(self._context.plan)
            there = replace(self._context, keys=keys, limits=limits, plan=plan)
            self._taken_over = SnapshotReader(there, may_offer=False).load(-1)
            log.warning("rank %s: goes on from round %s of run %s", self._me.rank, self._taken_over, origin)
        if origin is None and self._context.first_state is not None and not self._has_first_state:
            self._training.load(self._context.first_state())
            self._has_first_state = True
        key, proof = self._keys.snapshot(0), self._context.proof
        digests = put_parts(self._store, self._keys, 0, self._me.nonce, self._training.arrays(), proof)
        if digests is not None:
            agreement, first = self._training.agreement(), self._taken_over or 0
            pointer = SnapshotPointer(self._me.nonce, self._me.rank, digests, self._digests(), agreement, first)
            self._store.create(key, pointer.data(key, proof))


class LogReplayer:
    """Takes this replica's training state from the log, and holds its position there.

    It loads the newest snapshot and applies the means of the entries behind it. In a usual round it does nothing: the
    round runner applies the entry and moves the position on.

    Args:
        context: the services of the rendezvous.
        seals: the seals of the run.
        reducer: reads or computes means.
        sealer: knows when an entry takes too long.
        account: gets the decisions of the entries that are passed.

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
        """The number of entries in a row at which the anchor was not the seal's, also after a reload."""
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
        """Load the newest snapshot, or agree on the first anchor, and set the live parameters by it.

        Args:
            restored: the work of an earlier attempt of this rank. Work that no seal has counted since is kept.
        """
        entry = self._reader.load(-1)
        assert entry is not None  # it waits for one
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
        """Continue from an earlier position, whose training state was loaded."""
        self.position = position
        self._account.begin_at(position)
        self.read_newest_seal()

    def reload(self, above: int = -1) -> bool:
        """Take the state from the log, at least up to this position, and keep the live work that no mean contains.

        Args:
            above: do so only if there is a snapshot after this entry.

        Returns:
            True if that was done. The position may be a later one then.
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
        """Take the state from the log, because the anchor is not the one that an entry was made for.

        Args:
            entry: the open entry.
            seal: its seal.

        Raises:
            DivergenceError: the anchor differs for two entries in a row, also after this.
        """
        self.reload()
        if self.position != entry.index or self._training.digest(entry.fragment) == seal.anchor:
            self.n_diverged = 0
            return
        self.n_diverged += 1
        if self.n_diverged >= 2:
            raise DivergenceError(
                f"Rank {self._context.me.rank}, round {entry.index + 1}: this replica's anchor is not that of ranks "
                f"{', '.join(map(str, sorted(seal.replicas)))}, also after reloading the run. "
                "Do all replicas run the same version, and the same outer optimizer on the same kind of processor?"
            )

    def read_newest_seal(self) -> None:
        """Read the seal before this position, which says which replicas are expected."""
        is_first = self.position == self._reader.first
        self._context.members.seal = None if is_first else self._seals.read_seal_or_none(self.position - 1)

    def _replay(self, until: int) -> None:
        """Apply the means of the log to the anchor, up to a position. A newer snapshot may lead beyond it."""
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
                self._sealer.check_time(entry)
                context.members.check_abort()
                context.wait(next(pauses), ())
