"""One entry after another: publish, seal, reduce, adopt, and take the state from the log where it is not the log's.

The loop is level-triggered: look at what stands, do the next idempotent thing that is missing, wait. It may die between
any two store calls, and a second copy of it may run at the same time. When which entry is due, `rendezvous.py` knows.
"""

from __future__ import annotations

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
from diloco.parallel import Ask, Map, at_once
from diloco.patience import PatientStore, backoff
from diloco.phase import Phase, Plan
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


class Loop:
    """One replica's way through the log, an entry at a time."""

    def __init__(
        self,
        store: PatientStore,
        keys: Keys,
        me: Identity,
        work: Work,
        *,
        plan: Plan | None = None,
        min_quorum: int | None = None,
        weight: float | Callable[[], float] = 1.0,
        snapshot_every: int = 10,
        pace: Pace | None = None,
        reduce: Reduce = weighted_mean,
        clock: Callable[[], float] = monotonic,
        wait: Wait,
        rng: random.Random | None = None,
        background: Background = in_the_foreground,
        map: Map = map,
        ask: Ask = at_once,
    ) -> None:
        self.pace = pace or Pace()
        self.position = 0
        """The next entry to apply."""
        self._plan = plan or Plan(n_fragments=len(work.sizes()))
        self.phase = Phase(self._plan, clock)
        self._store = store
        self._keys = keys
        self._me = me
        self._work = work
        self._sizes = tuple(work.sizes())
        self._weight = weight
        self._clock = clock
        self._wait = wait
        self._ask = ask
        self._rng = rng or random.Random()
        self._members = Membership(store, keys, me)
        self._means = Means(store, keys, me, self._members, self.pace, reduce=reduce, clock=clock, map=map)
        self._sealing = Sealing(
            store, keys, me, self._members, self.phase, work, self.pace,
            min_quorum=min_quorum or 1, reduce=reduce, clock=clock, map=map, reload=self._reload,
        )  # fmt: skip
        self._sending = Sending(store, keys, me, self._members, self.phase, work, self.pace)
        self._log = Log(store, keys, me, self.pace, self._sizes, clock=clock, wait=wait, rng=self._rng)
        self._loader = Loader(
            store, keys, me, work, self.pace, snapshot_every=snapshot_every,
            clock=clock, wait=wait, rng=self._rng, check_abort=self._check_abort,
        )  # fmt: skip
        self._keeper = Keeper(store, keys, me, work, snapshot_every=snapshot_every, background=background)
        self._round: Round | None = None
        self._waited_s = 0.0
        """How long this replica waited for others in its last round."""
        self._unsealed = -1
        """An entry that was just seen to have no seal."""
        self._fence_checked_s = self._abort_checked_s = clock()
        self._diverged = 0
        """Number of entries in a row at which the anchor was not the seal's, also after reloading."""

    # -- one entry -------------------------------------------------------------------------------------------------

    def _publish(self, *, early: bool = False) -> None:
        """Send the work of the fragment whose turn it is, unless that is decided already.

        Args:
            early: in the midst of a phase, weighed by the steps it is made of.

        Raises:
            ContributionError: it is not finite, or a parameter has changed its shape.
        """
        r = self._current()
        if r.published or self._log.seal(r.entry) is not None:
            return
        began = self._clock()
        weight = self._early_weight(r) if early else check_weight(self._weight, self._me.rank, r.entry)
        r.is_early, r.sent_steps = early, self.phase.made[r.fragment] if weight else 0
        pauses = self._pauses()
        stands = early and self._stands(r)  # of an earlier attempt, perhaps
        while not stands:
            self._sending.send(r, weight, self._waited_s)
            stands = self._stands(r)
            if not stands and self._log.seal(r.entry) is not None:
                break
            if not stands:
                self._check_time(r)
                self._wait(next(pauses), ())
        if stands or not early:  # else the seal may only seem to stand: look again after the next step
            r.published, r.published_s = True, self._clock()
        r.move_s += self._clock() - began

    def _early_weight(self, r: Round) -> float:
        """Weigh work of fewer steps than a phase has; 0 where there is none, or nobody knows of how many it is."""
        steps = self.phase.made[r.fragment]
        if not steps or self.phase.is_restored[r.fragment]:
            return 0.0
        if callable(self._weight):
            return check_weight(self._weight, self._me.rank, r.entry, may_be_zero=True)
        weight = check_weight(self._weight, self._me.rank, r.entry)
        return weight * min(1.0, steps / self._plan.inner_steps)

    def _stands(self, r: Round) -> bool:
        """Tell whether a contribution stands in this rank's place, and remember what one of another process meets."""
        if not self._sealing.look_at_contribution(r, self._me.rank):
            return False
        seen = r.seen.get(self._me.rank)
        if seen is not None and seen[0].nonce != self._me.nonce and r.foreign is None:
            r.foreign, r.foreign_steps = self._work.payload(r.entry), self.phase.made[r.fragment]
        return True

    def _note_predecessor(self) -> None:
        """Where an earlier attempt's contribution stands for the open entry, it is this rank's: keep what comes now."""
        r = self._current()
        if self._stands(r) and r.foreign is not None:
            r.published, r.published_s = True, self._clock()

    @property
    def in_flight(self) -> bool:
        """Whether something was sent in phase whose round was not applied yet."""
        return (r := self._round) is not None and r.published and not r.is_early and r.foreign is None

    def _adopt(self) -> Adopted | None:
        """Wait until the next entry is sealed and its mean stands, helping both along, and apply it.

        Returns: None when the entry was jumped over: what it needs is no longer there, but a newer snapshot is.
        """
        r = self._current()
        r.started_s = began = self._clock()
        r.began_s = began if r.began_s is None else r.began_s
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
        settled, part = self._settle(r, seal)
        began = self._clock()
        self._keeper.before_step(r.entry, seal)
        self._work.apply(r.entry, mean, settled, part)
        step_s = self._clock() - began
        self._count_steps(r, settled, part)
        self._members.seal = seal
        self.position = r.entry + 1
        self._round = None
        if r.published:
            self._store.remove(self._keys.contribution(r.entry, self._me.rank))
        self._check_next_seal(r)
        self._learn(r)
        return Adopted(
            entry=r.entry,
            fragment=r.fragment,
            ranks=tuple(seal.inputs),
            left_out=tuple(sorted(r.left_out)),
            counted=self._log.settle(seal) is Settled.COUNTED,
            bytes_up=self._store.written_bytes - r.written_before,
            bytes_down=self._store.read_bytes - r.read_before,
            wait_s=r.wait_s,
            move_s=r.move_s,
            reduce_s=r.reduce_s,
            step_s=step_s,
        )

    def _settle(self, r: Round, seal: Seal) -> tuple[Settled, list[memoryview] | None]:
        """Tell what became of the live work, and of which part of it; None: of all.

        What was sent early is read back: steps were made since, and are still this replica's own. Where that cannot
        be read, all of it is dropped: nothing may count twice.
        """
        member = seal.members.get(self._me.rank)
        settled = self._log.settle(seal)
        if settled is Settled.DROPPED:
            return settled, None if r.foreign is None else [r.foreign]
        if member is not None and not member.weight:
            return Settled.COUNTED, []
        if member is not None and r.is_early:
            sent = self._sending.read_back(r, member.digest)
            return (Settled.DROPPED, None) if sent is None else (settled, [sent])
        return settled, None

    def _count_steps(self, r: Round, settled: Settled, part: list[memoryview] | None) -> None:
        """Keep account of how many steps the live work is made of."""
        f, made, is_restored = r.fragment, self.phase.made, self.phase.is_restored
        if self._plan.is_final(r.entry) or (part is None and not (settled is Settled.KEPT and self._work.carries)):
            made[f], is_restored[f] = 0, False
        elif part is not None and settled is Settled.COUNTED:
            made[f] -= r.sent_steps
        elif part is not None:
            made[f], is_restored[f] = made[f] - r.foreign_steps, False

    def _learn(self, r: Round) -> None:
        """Take note of how far apart replicas arrive: of those that came from one phase, less a known head start."""
        if self.phase.is_out:
            self._waited_s = 0.0
        else:
            self._waited_s = max(0.0, r.wait_s - self.phase.head_start_s)
            self._sealing.learn(r, self._waited_s)

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
        entry = r.entry + len(self._sizes)
        seal = self._log.seal(entry)
        if seal is None:
            self._unsealed = entry
        elif seal.anchor != self._work.digest(r.fragment):
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
        self._restore(progress, before)
        if self.position != before:
            self._round = None
            self._set_newest_seal()
        return True

    def _restore(self, progress: Any, position: int) -> None:
        """Take up live work as it was before an entry, as far as what was jumped over since has not settled it."""
        verdicts = self._log.verdicts(position, self.position, len(self._sizes))
        self._work.restore(progress, verdicts)
        for fragment, verdict in enumerate(verdicts):
            if verdict is not None and not (verdict is Settled.KEPT and self._work.carries):
                self.phase.made[fragment], self.phase.is_restored[fragment] = 0, False

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

    def _set_newest_seal(self) -> None:
        self._members.seal = self._log.insist_on_seal(self.position - 1) if self.position else None

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
        since_s = r.started_s
        if r.published_s is not None and not self._members.names_me:  # the others may be in the midst of a phase
            since_s = max(since_s, r.published_s + self._sealing.lone_s)
        if self._clock() - since_s > self.pace.round_timeout_s:
            raise self._sealing.out_of_time(r)

    def _check_fence(self) -> None:
        self._fence_checked_s = self._clock()
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
            raise AbortedError.told_by(self._keys.run_id, bytes(data))
