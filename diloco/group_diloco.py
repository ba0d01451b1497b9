"""A `DiLoCo` that several processes of one replica open together, in a process group.

Member 0, the leader, has a normal `DiLoCo` inside. The other members, the followers, execute the words that the leader
sends (`member_group.py`). So all members make each public call together, except `anchor()`, `rounds`, `inner_step`,
`is_over` and `progress`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from diloco.attached_state import AttachedState
from diloco.background import BackgroundThread
from diloco.errors import DiLoCoError
from diloco.extra_tensors import ExtraTensors
from diloco.fragments import plan_fragments
from diloco.lr_schedules import unwrapped
from diloco.member_group import Call, Members, error_of
from diloco.model_state import ModelState
from diloco.outer import DiLoCo, open_diloco
from diloco.process_check import store_of_members
from diloco.rendezvous.envelope import proof_of
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Limits, RoundReport
from diloco.rendezvous.run_location import RunLocation
from diloco.rendezvous.training_state import ApplyStats, PackedWork, Verdict
from diloco.replica_link import ReplicaLink
from diloco.settings import DiLoCoSettings, check_wires
from diloco.tensor_names import saved_buffers
from diloco.training_loop import TrainingLoop
from executors.errors import ReplicasError
from executors.patience import ROUND, waits

T = TypeVar("T")
log = logging.getLogger(__name__)

MILLIONTHS = 1_000_000
"""`progress` travels as a whole number of millionths, because a word has integers only."""
WAIT_BEYOND_ROUND_S = 60.0
"""A member waits for a word for the longest time of a round, plus this number of seconds."""


class MembersModelState(ModelState):
    """The training state of the leader. It gathers the members' tensors before it reads them.

    Args:
        members: the members of the replica.
        given: the arguments of `ModelState`.
        options: the other arguments of `ModelState`.

    Example:
        MembersModelState(members, model, fragments, settings)
    """

    def __init__(self, members: Members, *given: Any, **options: Any) -> None:
        self._members = members
        super().__init__(*given, **options)

    def _all(self) -> range:
        return range(len(self.fragments))

    def hold(self, fragment: int, *, is_early: bool) -> None:
        self._members.need([fragment], compare=True)
        super().hold(fragment, is_early=is_early)

    def merge(self) -> None:
        self._members.need(index for index, held in enumerate(self._held) if held.has_merge)
        super().merge()

    def apply(
        self, entry: int, mean: Sequence[memoryview], verdict: Verdict, packed: PackedWork | None, *, partly: bool
    ) -> ApplyStats:
        if not self._trains_on:  # the round may then change the live parameters in place
            self._members.note_writes()
        return super().apply(entry, mean, verdict, packed, partly=partly)

    def progress(self) -> list[Tensor]:
        self._members.need(self._all())
        return super().progress()

    def resume(self, progress: list[Tensor] | None, verdicts: Sequence[Verdict | None] = ()) -> None:
        self._members.note_all_written()
        super().resume(progress, verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSetup:
    """The facts about the leader's new `DiLoCo` that followers need."""

    me: Identity
    saved_position: int
    """The position of the leader's saved state. -1: there is none."""
    is_from_origin: bool
    """True if the saved state belongs to the run that this run continues."""
    step: int
    """The step of the run at which the saved state was saved."""
    buffers: Mapping[str, Tensor]
    """The buffers that no round averages."""


# More than 20 methods: it replaces each public method of `DiLoCo`, because all members make each call together.
class GroupDiLoCo(DiLoCo):
    """The `DiLoCo` of one member. `DiLoCo(model, group=…)` returns it in a process group.

    Example:
        diloco = DiLoCo(DistributedDataParallel(model), inner_steps=100)
    """

    def open_in_group(self, model: nn.Module, group: Any, location: RunLocation, given: Mapping[str, Any]) -> None:
        """Open the DiLoCo together with the other members.

        Args:
            model: this member's model.
            group: the process group of the members.
            location: the run and the rank of the replica.
            given: the arguments of `DiLoCo`, except for the model.
        """
        self._pid, self._closed = os.getpid(), False
        self._attached_names: set[str] = set()
        options = {name: value for name, value in given.items() if name != "group"}
        sync_buffers, wires = options["sync_buffers"], check_wires(options["wire"], options["mean_wire"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the leader's own DiLoCo gives this warning
            fragments = plan_fragments(
                model, options["fragments"], sync_buffers=sync_buffers, wires=wires, has_members=True
            )
        timeout_s = options["round_timeout_s"] + WAIT_BEYOND_ROUND_S
        self._members_ = members = Members(group, store_of_members(group, options["name"]), model, fragments, timeout_s)
        self._link = ReplicaLink(location.replica, options["name"])
        self._weigh: Callable[[], float] = options["weight"] if callable(options["weight"]) else lambda: 1.0
        self._has_own_weight = callable(options["weight"])
        self._status: Sequence[int] = ()
        members.begin(Call.OPEN)
        try:
            if members.is_leader:
                self._begin_leader(model, options)
            else:
                self._begin_follower(model, location, len(fragments), options)
        except BaseException:
            members.close()
            raise

    def _begin_leader(self, model: nn.Module, options: dict[str, Any]) -> None:
        members = self._members_
        assert members.mirror is not None
        if callable(weight := options["weight"]):
            options["weight"] = lambda: members.sum_of(weight)
        # the lists may contain modules of the model, which differ between members
        if not isinstance(options["fragments"], int):
            options["fragments"] = [
                [slot.name for slot in fragment.slots if slot.kind == "parameter"] for fragment in members.fragments
            ]
        with members.leading():
            members.gather_all()
            self._plain = plain = open_diloco(
                members.mirror,
                limits=self._internals.limits,
                begun_at=self._internals.begun_at,
                is_trainers=self._internals.is_trainers,
                make_state=partial(MembersModelState, members),
                **options,
            )
            if members.is_sharded:
                # The optimizers of the members step their shards, and not the mirror. So stale copies cannot be found
                # by comparing the mirror.
                plain._stale_copies.trust()
                plain._history.close()
            members.scatter_all()
        plain._attached.on_keep = members.keep
        # The parts of the leader's DiLoCo that trainers use.
        self._plan, self._settings, self._extension = plain._plan, plain._settings, plain._extension
        self._loop, self._attached, self._name = plain._loop, plain._attached, plain._name
        kept = plain._attached.kept
        setup = LeaderSetup(
            me=plain._me,
            saved_position=-1 if kept is None else kept.position,
            is_from_origin=kept is not None and plain._me.attempt == 0,
            step=plain._attached.step,
            buffers={name: buffer.cpu() for name, buffer in plain._model_state.local_buffers.all().items()},
        )
        members.return_(self._take_status(), setup)

    def _begin_follower(
        self, model: nn.Module, location: RunLocation, n_fragments: int, options: dict[str, Any]
    ) -> None:
        members = self._members_
        with self._link.waiting("first anchor"):
            status, setup = members.obey(self._weigh, lambda position: None)
        me = setup.me
        self._settings = settings = DiLoCoSettings.of(
            options, n_fragments=n_fragments, key=location.key_of_run(options["key"]), world_size=me.world_size,
            rank=me.rank, begun_at=self._internals.begun_at, begins_warm=location.begins_warm,
        )  # fmt: skip
        self._plan = settings.plan
        self._name = (me.nonce, options["name"])
        proof = proof_of(settings.key)
        limits = self._internals.limits or Limits(round_timeout_s=settings.round_timeout_s)
        store = RetryingStore(
            location.store, clock=monotonic, tolerance=replace(ROUND, seconds=limits.round_timeout_s),
            copies=proof.copies, waits=waits,
        )  # fmt: skip
        keys = Keys(location.run_id, options["name"], location.key_of_outcomes(options["key"]))
        self._uploads = BackgroundThread(f"diloco {options['name']} of rank {me.rank}, member {members.number}")
        self._attached = AttachedState(
            store, keys, me, self._uploads, settings.plan, proof, self._internals.begun_at, members.number
        )
        if setup.is_from_origin and location.origin is not None:
            self._attached.load_from_run(location.origin, setup.saved_position)
        self._attached.step = setup.step
        buffers = saved_buffers(model)
        with torch.no_grad():
            for name, values in setup.buffers.items():
                buffers[name].copy_(values)
        self._extension: Any = SimpleNamespace(is_trainers=False)
        self._keep_status(status)
        self._loop = TrainingLoop(settings, begins_at=self._inner_step)

    # -- calls that all members make ---------------------------------------------------------------------------------

    def _together(self, call: Call, act: Callable[[DiLoCo], T], *, sends: bool = True) -> T | None:
        """Make a call in the leader while the followers execute its words. Return the leader's result in all members.

        Args:
            call: the call.
            act: makes the call of the leader's `DiLoCo`.
            sends: False: followers get None.
        """
        members = self._members_
        members.begin(call)
        if members.is_leader:
            with members.leading():
                result = act(self._plain)
            members.return_(self._take_status(), result if sends else None)
            return result
        with self._link.waiting("round"):
            status, found = members.obey(self._weigh, self._keep)
        self._keep_status(status)
        self._attached.follow(self._inner_step, self._n_steps)
        sent: T | None = found
        return sent

    def _take_status(self) -> Sequence[int]:
        """Return the numbers of the leader's DiLoCo that followers keep."""
        plain = self._plain
        total = plain._plan.total_steps
        part = 0.0 if not total else min(1.0, plain._training_side.phase.run_step / total)
        return (
            plain._inner_step, plain.rounds, int(plain._is_over), -1 if total is None else int(total),
            plain._training_side.phase.n_steps, int(part * MILLIONTHS),
        )  # fmt: skip

    def _keep_status(self, status: Sequence[int]) -> None:
        self._status = status
        if (total := status[3]) >= 0:
            self._plan.total_steps = total

    def _keep(self, position: int) -> None:
        """Save this member's attached state, because the leader saves its own."""
        if self._attached.things:
            self._attached.keep(position, [], [])

    def step(self) -> RoundReport | None:
        self._check_open()
        self._link.progress()
        if not self._members_.is_leader and not self._is_over:
            self._loop.n_calls += 1
        return self._together(Call.STEP, lambda plain: plain.step())

    def steps(self) -> Iterator[int]:
        self._check_open()
        if self._members_.is_leader:
            self._plain.steps()  # this call checks the plan, and notes that the loop follows the run
        elif self._plan.total_steps is None:
            raise DiLoCoError("steps() ends at the planned end of the run. Pass total_steps=… to DiLoCo.")
        return self._loop.steps(self, self._undo_step)

    def _undo_step(self) -> None:
        self._together(Call.UNDO, lambda plain: plain._undo_step())

    def stop(self) -> None:
        self._check_open()
        self._together(Call.STOP, lambda plain: plain.stop())

    def sync(self) -> list[RoundReport]:
        self._check_open()
        self._link.progress()
        return self._together(Call.SYNC, lambda plain: plain.sync()) or []

    def average_also(self, thing: ExtraTensors) -> None:
        raise DiLoCoError(
            f"average_also() is not available in a replica of {self._members_.size} processes. Use one process per "
            "replica, or leave the tensors out of the average."
        )

    def _attach_state(self, name: str, thing: Any, *, follow: bool, lead: int | None = None) -> None:
        self._check_open()
        members, attached = self._members_, self._attached
        # Optimizers and schedules of a replicated model are the same in all members, so one copy is saved.
        is_shared = not members.is_sharded and _is_of_model(unwrapped(thing))
        found = attached.saved_position(name)
        mine = name, is_shared, found
        members.begin(Call.ATTACH)
        if members.is_leader:
            with members.leading():
                plain = self._plain
                answers = members.ask(mine)
                _check_alike(answers)
                loads = is_loaded(answers, mine)
                positions = [position for _, _, position in answers]
                if not is_shared and not loads and max(positions) >= 0:
                    log.warning(
                        "rank %s: the saved state of %r is not loaded, because not all %s members of this replica have "
                        "it. All of them begin without it.", plain._me.rank, name, members.size,
                    )  # fmt: skip
                attached.catch_up(plain._inner_step, plain._training_side.phase.n_steps)
                attached.attach(name, thing, plain._inner_step, follow=follow, lead=lead, loads=loads)
                plain._model_state.before_hold = plain._saver.save_if_due
                if not members.is_sharded:
                    plain._stale_copies.warn_of_copies(thing, plain._extra_addresses())
            # The lead of a schedule is part of the saved state, so the followers need the value of the leader.
            state = (_state_of(thing), attached.leads.get(name)) if is_shared and positions[0] >= 0 else None
            members.return_(self._take_status(), state)
            error = members.agree(None)
        else:
            status, state = members.obey(self._weigh, self._keep, mine)
            self._keep_status(status)
            loads = is_loaded(members.answers, mine)
            error = members.agree(
                error_of(partial(self._attach_in_follower, name, thing, state, follow=follow, lead=lead, loads=loads))
            )
        if error is not None:
            attached.detach(name)
            raise error

    def _attach_in_follower(
        self, name: str, thing: Any, state: Any, *, follow: bool, lead: int | None, loads: bool
    ) -> None:
        """Attach an object in this member, and load the leader's state into it.

        Args:
            name: the name of the object.
            thing: the object.
            state: the state of the leader's object, and the lead of a schedule. None: this member has its own.
            follow: True if DiLoCo steps the object, which is a schedule.
            lead: the steps by which a schedule is ahead of the run. None: the object knows it.
            loads: True: load the saved state of this member.
        """
        attached = self._attached
        attached.attach(name, thing, self._inner_step, follow=follow, lead=lead, loads=loads)
        if not self._members_.is_sharded and _is_of_model(unwrapped(thing)):
            attached.of_leader.add(name)
            if state is not None:
                unwrapped(thing).load_state_dict(state[0])
                attached.leads |= {} if state[1] is None else {name: state[1]}

    def state_dict(self) -> dict[str, Any]:
        self._check_open()
        return self._together(Call.STATE_DICT, lambda plain: plain.state_dict(), sends=False) or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_open()
        self._together(Call.LOAD, lambda plain: plain.load_state_dict(state))

    def anchor(self) -> dict[str, Tensor]:
        return self._plain.anchor() if self._members_.is_leader else {}

    # -- the end -----------------------------------------------------------------------------------------------------

    def _close(self, *, in_order: bool, returns: bool = False) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            if in_order:
                self._together(Call.CLOSE, lambda plain: plain._close(in_order=True))
                # Otherwise the leader would end well, although another member makes another call.
                self._members_.barrier()
            elif self._members_.is_leader:
                self._plain._close(in_order=False)
            if not self._members_.is_leader:
                self._uploads.finish()
        finally:
            self._members_.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        members, cause = self._members_, f"{type(error).__name__}: {error}"
        members.leave(f"Member {members.number} of this replica has left the DiLoCo after {cause}")
        with contextlib.suppress(ReplicasError):
            self._close(in_order=False)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        return self._plain.rounds if self._members_.is_leader else self._status[1]

    @property
    def inner_step(self) -> int:
        return self._plain.inner_step if self._members_.is_leader else self._status[0]

    @property
    def is_over(self) -> bool:
        return self._plain.is_over if self._members_.is_leader else bool(self._status[2])

    @property
    def progress(self) -> float:
        if self._members_.is_leader or self._plan.total_steps is None:
            return self._plain.progress if self._members_.is_leader else super().progress
        return self._status[5] / MILLIONTHS

    @property
    def _inner_step(self) -> int:
        return self._plain._inner_step if self._members_.is_leader else self._status[0]

    @property
    def _is_over(self) -> bool:
        return self._plain._is_over if self._members_.is_leader else bool(self._status[2])

    @property
    def _n_steps(self) -> int:
        return self._status[4]

    def names_of_anchor(self) -> set[str]:
        """Return the names of the averaged tensors. All members know them.

        Example:
            diloco.names_of_anchor() == set(diloco.anchor())   # in the leader
        """
        return {slot.name for fragment in self._members_.fragments for slot in fragment.slots}


def _check_alike(answers: Sequence[tuple[str, bool, int]]) -> None:
    """Refuse members that attach different objects in one call.

    Raises:
        DiLoCoError: a member attaches an object of another name or kind than member 0.
    """
    for member, (name, is_shared, _) in enumerate(answers):
        if (name, is_shared) != answers[0][:2]:
            raise DiLoCoError(
                f"Member {member} of this replica attaches {name!r}, and member 0 attaches {answers[0][0]!r}"
                + (" of another kind" * (name == answers[0][0]))
                + ". All members must attach the same objects in the same order."
            )


def is_loaded(answers: Sequence[tuple[str, bool, int]], mine: tuple[str, bool, int]) -> bool:
    """Return True if a member loads its saved state of an object: a private state is loaded in all members or in none.

    Args:
        answers: by member, the name of the object, True if one copy is saved for all members, and the position of the
            saved state.
        mine: the answer of this member.

    Example:
        is_loaded([("optimizer", False, 3), ("optimizer", False, -1)], ("optimizer", False, 3))
    """
    _, is_shared, found = mine
    return found >= 0 and (is_shared or {position for _, _, position in answers} == {found})


def _is_of_model(thing: Any) -> bool:
    """Return True for an optimizer or a schedule, whose state is the same in all members of a replicated model."""
    return isinstance(getattr(thing, "param_groups", None), list) or isinstance(thing, LRScheduler)


def _state_of(thing: Any) -> Any:
    return unwrapped(thing).state_dict()
