"""Rounds over a store: publish, seal, reduce, adopt.

One log for all fragments: entry k = 0, 1, 2, … belongs to fragment k % P, and entries are applied in order, so a
replica's whole position is one integer. The loop is level-triggered: look at what stands, do the next idempotent thing
that is missing, wait. It may die between any two store calls, and a second copy of it may run at the same time.
Plain blocking code; the clock, the waiting and the work are given, and the tests run it under a simulated scheduler.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

from diloco.contract import check_weight
from diloco.errors import AbortedError, DivergenceError, FencedError
from diloco.keeping import Background, Keeper
from diloco.keys import Keys
from diloco.loading import Loader
from diloco.log import Log
from diloco.means import Means
from diloco.membership import Identity, Membership
from diloco.parallel import Map
from diloco.patience import PatientStore, backoff
from diloco.records import Seal
from diloco.reduction import Reduce, weighted_mean
from diloco.rounds import Adopted, Pace, Round
from diloco.sealing import Sealing
from diloco.sending import Sending
from diloco.work import Settled, Work

Wait = Callable[[float, Sequence[str]], None]
"""Returns after some seconds, or earlier when something changes below one of the key prefixes."""


MOST_PAUSE_S = 1.0


def in_the_foreground(job: Callable[[], None]) -> None:
    """Do it now."""
    job()


class Rendezvous:
    """One replica's way through the log of sealed rounds."""

    def __init__(
        self,
        store: PatientStore,
        keys: Keys,
        me: Identity,
        work: Work,
        *,
        min_quorum: int | None = None,
        weight: float | Callable[[], float] = 1.0,
        last_entry: int | None = None,
        snapshot_every: int = 10,
        pace: Pace | None = None,
        reduce: Reduce = weighted_mean,
        clock: Callable[[], float] = monotonic,
        wait: Wait,
        rng: random.Random | None = None,
        background: Background = in_the_foreground,
        map: Map = map,
    ) -> None:
        self.pace = pace or Pace()
        self.position = 0
        """The next entry to apply."""
        self._store = store
        self._keys = keys
        self._me = me
        self._work = work
        self._sizes = tuple(work.sizes())
        self._weight = weight
        self._last_entry = last_entry
        self._clock = clock
        self._wait = wait
        self._rng = rng or random.Random()
        self._members = Membership(store, keys, me.world_size)
        self._means = Means(store, keys, me, self._members, self.pace, reduce=reduce, clock=clock, map=map)
        self._sealing = Sealing(
            store, keys, me, self._members, work, self.pace,
            min_quorum=min_quorum or 1, reduce=reduce, clock=clock, map=map, reload=self._reload,
        )  # fmt: skip
        self._sending = Sending(store, keys, me, self._members, work, self.pace)
        self._log = Log(store, keys, me, self.pace, clock=clock, wait=wait, rng=self._rng)
        self._loader = Loader(
            store, keys, me, work, self.pace, snapshot_every=snapshot_every,
            clock=clock, wait=wait, rng=self._rng, check_abort=self._check_abort,
        )  # fmt: skip
        self._keeper = Keeper(store, keys, me, work, snapshot_every=snapshot_every, background=background)
        self._round: Round | None = None
        self._waited_s = 0.0
        """How long this replica waited for others in its last round."""
        self._abort_checked_s = clock()
        self._diverged = 0
        """Number of entries in a row at which the anchor was not the seal's, also after reloading."""

    # -- beginning and leaving -------------------------------------------------------------------------------------

    def start(self, restored: tuple[int, Any] | None = None) -> None:
        """Take the state from the log, or agree on the first anchor, and catch up.

        Args:
            restored: a position of an earlier copy of this rank and the live work it had then. What no seal has
                counted since goes on with this one.
        """
        self.position = self._load(above=-1)
        if restored is None:
            self._work.restore(None)
        else:
            position, progress = restored
            self._replay(until=position)
            self._work.restore(progress, self._log.verdicts(position, self.position, len(self._sizes)))
        self._set_expected()
        self.catch_up()

    def catch_up(self) -> list[Adopted]:
        """Adopt every entry that is sealed already."""
        adopted = []
        while self._log.seal(self.position) is not None:
            if (entry := self.adopt()) is not None:
                adopted.append(entry)
        return adopted

    def leave(self) -> None:
        """Say that nothing more is to be expected of this replica."""
        pauses = self._pauses()
        while not self._store.write(self._keys.bye(self._me.rank, self._me.attempt), b""):
            self._wait(next(pauses), ())

    # -- one entry -------------------------------------------------------------------------------------------------

    def meet(self) -> list[Adopted]:
        """Go through the due entry; when others went through it without us, also through the next open one.

        So whoever was late is in phase again after one round.

        Raises:
            FencedError: a newer attempt of this rank has begun.
        """
        self._check_fence()
        self.publish()
        first = self.adopt()
        if first is not None and first.settled is Settled.COUNTED:
            return [first]
        adopted = [] if first is None else [first]
        while True:
            adopted += self.catch_up()
            if self._last_entry is not None and self.position > self._last_entry:
                return adopted  # the plan is fulfilled: one more would be a round alone
            self.publish()
            if (last := self.adopt()) is not None:
                return [*adopted, last]

    def publish(self) -> None:
        """Send the work of the fragment whose turn it is, unless that is decided already.

        Raises:
            ContributionError: it is not finite, or a parameter has changed its shape.
        """
        r = self._current()
        if r.published or self._log.seal(r.entry) is not None:
            return
        began = self._clock()
        weight = check_weight(self._weight, self._me.rank, r.entry)
        pauses = self._pauses()
        while True:
            self._sending.send(r, weight, self._waited_s)
            if self._sealing.look_at_contribution(r, self._me.rank) or self._log.seal(r.entry) is not None:
                break
            self._check_time(r)
            self._wait(next(pauses), ())
        r.published = True
        r.move_s += self._clock() - began

    @property
    def in_flight(self) -> bool:
        """Whether something was sent whose round was not applied yet."""
        return self._round is not None and self._round.published

    def forget(self) -> None:
        """Do not wait for what is in flight."""
        self._round = None

    def go_back(self, position: int) -> None:
        """Continue from an earlier position; the work was given the state that belongs to it."""
        self.position = position
        self._round = None

    def adopt(self) -> Adopted | None:
        """Wait until the next entry is sealed and its mean stands, helping both along, and apply it.

        Returns: None when the entry was jumped over: what it needs is no longer there, but a newer snapshot is.
        """
        r = self._current()
        r.started_s = began = self._clock()
        waited_before, reduced_before = r.wait_s, r.reduce_s
        pauses = self._pauses()
        while True:
            seal = self._log.seal(r.entry)
            if seal is None:
                self._check_abort()
                if self._sealing.try_seal(r, self._means.patience_s):
                    seal = self._log.seal(r.entry)
            if seal is not None and self.position == r.entry:
                mean = self._means.collect(r, seal)
                if mean is not None:
                    self._agree(r, seal)
                    if self.position != r.entry:
                        return None
                    waited_s, reduced_s = r.wait_s - waited_before, r.reduce_s - reduced_before
                    r.move_s += self._clock() - began - waited_s - reduced_s
                    return self._apply(r, seal, mean)
                self._check_abort()
            if self.position != r.entry or (self._is_stuck(r) and self._reload(above=r.entry)):
                return None
            self._check_time(r)
            paused = self._clock()
            pause_s = max(next(pauses), min(self._store.answer_s, MOST_PAUSE_S))  # a far store is not asked on and on
            self._wait(pause_s, self._changes(r, seal))
            r.wait_s += self._clock() - paused

    def _is_stuck(self, r: Round) -> bool:
        """Tell whether the entry cannot be applied with what was found last, now or for ever."""
        stuck, r.stuck = r.stuck or self._log.is_rotten(r.entry), False
        return stuck

    def _changes(self, r: Round, seal: Seal | None) -> list[str]:
        """Return the folders in which the next thing will show."""
        if seal is not None:
            return [self._keys.folder_of(self._keys.mean(r.entry, 0))]
        keys = [self._keys.seal(r.entry)]
        if r.looks:
            keys.append(self._keys.contribution(r.entry, 0))
        return [self._keys.folder_of(key) for key in keys]

    def _apply(self, r: Round, seal: Seal, mean: Sequence[memoryview]) -> Adopted:
        began = self._clock()
        settled = self._log.settle(seal)
        self._keeper.before_step(r.entry, seal)
        self._work.apply(r.entry, mean, settled)
        step_s = self._clock() - began
        self._members.expected = {rank: member.attempt for rank, member in seal.members.items()}
        self.position = r.entry + 1
        self._round = None
        if r.published:
            self._store.remove(self._keys.contribution(r.entry, self._me.rank))
        self._check_next_seal(r)
        self._waited_s = r.wait_s
        self._sealing.learn(r)
        return Adopted(
            entry=r.entry,
            fragment=r.fragment,
            ranks=tuple(sorted(seal.members)),
            left_out=tuple(sorted(r.left_out)),
            settled=settled,
            bytes_up=self._store.written_bytes - r.written_before,
            bytes_down=self._store.read_bytes - r.read_before,
            wait_s=r.wait_s,
            move_s=r.move_s,
            reduce_s=r.reduce_s,
            step_s=step_s,
        )

    # -- the log is the truth ----------------------------------------------------------------------------------------

    def _agree(self, r: Round, seal: Seal) -> None:
        """Make sure that the mean is applied to the anchor it was made for.

        Raises:
            DivergenceError: two entries running, also the log itself led elsewhere.
        """
        if self._work.digest(r.fragment) == seal.anchor:
            self._diverged = 0
            return
        self._reload()
        if self.position != r.entry or self._work.digest(r.fragment) == seal.anchor:
            self._diverged = 0
            return
        self._diverged += 1
        if self._diverged >= 2:
            raise DivergenceError(
                f"Rank {self._me.rank}, round {r.entry}: this replica's anchor is not that of ranks "
                f"{', '.join(map(str, sorted(seal.members)))}, also after reloading the run. "
                "Do all replicas run the same version, and the same outer optimizer on the same kind of processor?"
            )

    def _check_next_seal(self, r: Round) -> None:
        """Reload when the fragment's next seal, if it stands already, was made for another anchor than ours is now."""
        seal = self._log.seal(r.entry + len(self._sizes))
        if seal is not None and seal.anchor != self._work.digest(r.fragment):
            self._reload()

    def _reload(self, above: int = -1) -> bool:
        """Take the state from the log, at least up to where we are, and keep the live work that no mean contains.

        Args:
            above: do so only when a snapshot after this entry stands.

        Returns: whether that was done. The position may be a later one then.
        """
        before, progress = self.position, self._work.progress()
        entry = self._loader.load(above)
        if entry is None:
            return False
        self.position = entry
        self._replay(until=before)
        self._work.restore(progress, self._log.verdicts(before, self.position, len(self._sizes)))
        if self.position != before:
            self._round = None
            self._set_expected()
        return True

    def _load(self, above: int) -> int:
        entry = self._loader.load(above)
        assert entry is not None  # it waits for one
        return entry

    def _replay(self, until: int) -> None:
        """Apply the means that stand to the anchor, up to a position; perhaps jump beyond it."""
        pauses = self._pauses()
        r: Round | None = None
        while self.position < until:
            if r is None or r.entry != self.position:
                r = self._new_round(self.position)
            seal = self._log.seal(r.entry)
            mean = self._means.collect(r, seal) if seal is not None else None
            if mean is not None:
                self._work.replay(r.entry, mean)
                self.position += 1
            elif self._is_stuck(r) and (entry := self._loader.load(r.entry)) is not None:
                self.position = entry
            else:
                self._check_time(r)
                self._check_abort()
                self._wait(next(pauses), ())

    def _set_expected(self) -> None:
        if self.position and (seal := self._log.insist_on_seal(self.position - 1)) is not None:
            self._members.expected = {rank: member.attempt for rank, member in seal.members.items()}

    # -- small things ----------------------------------------------------------------------------------------------

    def _current(self) -> Round:
        if self._round is None or self._round.entry != self.position:
            self._round = self._new_round(self.position)
        return self._round

    def _new_round(self, entry: int) -> Round:
        fragment = entry % len(self._sizes)
        r = Round(entry, fragment, self._sizes[fragment], self._clock())
        r.read_before, r.written_before = self._store.read_bytes, self._store.written_bytes
        return r

    def _pauses(self) -> Iterator[float]:
        return backoff(self._rng, most_s=min(MOST_PAUSE_S, max(0.02, self.pace.grace_s / 4)))

    def _check_time(self, r: Round) -> None:
        if self._clock() - r.started_s > self.pace.round_timeout_s:
            raise self._sealing.out_of_time(r)

    def _check_fence(self) -> None:
        newer = self._me.attempt + 1
        if self._store.look(self._keys.claim(self._me.rank, newer), size=0) is not None:
            raise FencedError(
                f"Rank {self._me.rank} of run {self._keys.run_id!r}: attempt {newer} has begun, and this is attempt "
                f"{self._me.attempt}. The newest one is the rank; this one ends."
            )

    def _check_abort(self) -> None:
        if self._clock() - self._abort_checked_s < self.pace.abort_check_s:
            return
        self._abort_checked_s = self._clock()
        data = self._store.look(self._keys.abort())
        if data is not None:
            raise AbortedError(f"Run {self._keys.run_id!r} was aborted: {_reason(data)}")


def _reason(data: memoryview) -> str:
    try:
        record = json.loads(bytes(data))
        return f"{record['who']}: {record['why']}"
    except (ValueError, KeyError, TypeError):
        return bytes(data[:500]).decode(errors="replace")
