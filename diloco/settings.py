"""Checks the arguments of `DiLoCo` before anything is written, and derives the settings that follow from them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from diloco.errors import DiLoCoError
from diloco.outer_defaults import PAPER_OUTER, SHORT_ROUND_STEPS, default_outer
from diloco.outer_optimizer import OptimizerFactory, Schedule, never
from diloco.rendezvous.frames import MAX_WEIGHT
from diloco.rendezvous.phase import RoundPlan
from diloco.wires import DEFAULT_MEAN_WIRE, MEAN_WIRES, WIRES
from executors.errors import kind_of
from executors.store.run_key import key_id

MAX_WARMUP_ROUNDS = 100
UNKNOWN_WARMUP_ROUNDS = 40
MEASURED_ROUNDS = 60
"""The number of rounds of the longest runs in docs/results/outer_settings.md. Longer runs were not measured."""
HIGH_MOMENTUM = 0.9
LEAST_COSTLY_WIRE = 10_000_000
"""The values of a round from which the time of encoding matters."""
DEFAULT_INNER_STEPS = 500


# More than 20 methods: each setting that follows from the arguments of the user is a property, so it is derived in one
# place.
@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoSettings:
    """The settings of one DiLoCo: the arguments of `DiLoCo`, which documents them, and settings that follow from them.

    Example:
        DiLoCoSettings.of({"inner_steps": 10, …}, n_fragments=1, world_size=2, rank=0).check()
    """

    inner_steps: int | None
    round_seconds: float | None
    outer_optimizer: OptimizerFactory | None
    outer_lr: float | None
    """None: the property `outer` derives the value."""
    outer_momentum: float | None
    """None: the property `outer` derives the value."""
    momentum_warmup: int | Literal["auto"]
    final_average: bool
    total_steps: int | None
    total_rounds: int | None
    n_fragments: int
    background: bool | Literal["auto"]
    overlap_steps: int | Literal["auto"]
    overlap_seconds: float | Literal["auto"]
    merge: str
    mix: float
    wire: str
    mean_wire: str | None
    robust: str | None
    late: str
    carry_rounds: int | None
    min_quorum: int | None
    grace_s: float
    round_timeout_s: float
    weight: float | Callable[[], float]
    snapshot_every: int
    allow_no_rounds: bool
    same_data: str
    world_size: int
    rank: int
    begun_at: int = 0
    """The step of a trainer at which the run began, if the trainer began from its own checkpoint."""
    begins_warm: bool = False
    """True if the run begins with the momentum of another run. A warmup would remove that momentum."""
    key: bytes | None = field(default=None, repr=False)
    _plan: RoundPlan | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, given: Mapping[str, Any], **found: Any) -> Self:
        """Return settings from the arguments of `DiLoCo`.

        Args:
            given: the arguments by name. Other names are ignored, and missing ones become None.
            found: settings that were derived elsewhere. They replace given ones.
        """
        named: dict[str, Any] = {setting.name: given.get(setting.name) for setting in fields(cls) if setting.init}
        return cls(**{**named, **found})

    def check(self) -> None:
        """Check every argument.

        Raises:
            ValueError: a value is out of its range. The message names the argument, its value and the legal values.
            TypeError: a value has the wrong type.
        """
        for name in ("snapshot_every", "world_size"):
            _at_least(name, getattr(self, name), 1)
        _at_least("rank", self.rank, 0)
        self._check_when()
        if not isinstance(self.background, bool) and self.background != "auto":
            raise TypeError(f'background must be True, False or "auto", got background={self.background!r}.')
        if self.background is False and self.plan.overlap_steps is None:
            name = "overlap_steps" if self.round_seconds is None else "overlap_seconds"
            raise ValueError(
                f'{name}="auto" lets training continue until a mean arrives, so rounds must run in the background: got '
                "background=False. Remove background=False, or use a number."
            )
        _one_of("merge", self.merge, ("anchor", "carry"))
        if self.merge == "carry" and self.mix:
            raise ValueError(
                f'merge="carry" keeps later work as it is, so mix must be 0, got mix={self.mix}. '
                'Remove mix, or use merge="anchor".'
            )
        if self.carry_rounds is not None:
            _at_least("carry_rounds", self.carry_rounds, 1, also="None or ")
        if self.outer_optimizer is not None and not callable(self.outer_optimizer):
            raise TypeError(
                "outer_optimizer must be a callable from a list of parameters to a torch.optim.Optimizer, "
                f"got {kind_of(self.outer_optimizer)}."
            )
        if self.momentum_warmup != "auto":
            _at_least("momentum_warmup", self.momentum_warmup, 0, also='"auto" or ')
        if self.min_quorum is not None:
            _at_least("min_quorum", self.min_quorum, 1)
            if self.min_quorum > self.world_size:
                raise ValueError(
                    f"min_quorum must be at most the world size of {self.world_size}, got min_quorum={self.min_quorum}."
                )
        _one_of("late", self.late, ("carry", "drop"))
        if self.robust is not None and self.robust != "clip":
            raise ValueError(f"robust must be None or 'clip', got robust={self.robust!r}.")
        _one_of("same_data", self.same_data, ("raise", "warn", "allow"))
        if self.outer_lr is not None:
            _number("outer_lr", self.outer_lr, also="None or ")
        if self.outer_momentum is not None:
            _number("outer_momentum", self.outer_momentum, below=1.0, also="None or ")
        _number("mix", self.mix, high=1.0)
        _number("grace_s", self.grace_s)
        _number("round_timeout_s", self.round_timeout_s)
        if self.round_timeout_s == 0:
            raise ValueError("round_timeout_s must be more than 0, got round_timeout_s=0.")
        if not isinstance(self.final_average, bool):
            raise TypeError(f"final_average must be True or False, got final_average={self.final_average!r}.")
        if not callable(self.weight):
            if isinstance(self.weight, (int, float)) and not self.weight > 0:  # this comparison also refuses NaN
                raise ValueError(f"weight must be more than 0, got weight={self.weight}.")
            _number("weight", self.weight, high=MAX_WEIGHT)

    def _check_when(self) -> None:
        """Check the arguments that decide when rounds are due: by steps or by the clock."""
        by_steps = {"inner_steps": None, "total_steps": None, "overlap_steps": 0}
        by_clock = {"round_seconds": None, "total_rounds": None, "overlap_seconds": 0}
        others = by_clock if self.round_seconds is None else by_steps
        for (name, default), instead in zip(others.items(), by_steps if others is by_clock else by_clock, strict=True):
            if (value := getattr(self, name)) != default or isinstance(value, bool):
                if others is by_clock:
                    raise ValueError(f"{name} needs round_seconds, got {name}={value!r}. Use {instead}=… instead.")
                if name == "inner_steps":
                    raise ValueError(
                        "Give either inner_steps (rounds by step) or round_seconds (rounds by the clock), not both: "
                        f"got inner_steps={value} and round_seconds={self.round_seconds}."
                    )
                raise ValueError(
                    f"{name} is for rounds by step, and round_seconds={self.round_seconds} gives rounds by the clock: "
                    f"got {name}={value!r}. Use {instead}=… instead."
                )
        if self.round_seconds is None:
            self._check_steps()
            return
        _number("round_seconds", self.round_seconds)
        if self.round_seconds == 0:
            raise ValueError("round_seconds must be more than 0, got round_seconds=0.")
        if self.total_rounds is not None:
            _at_least("total_rounds", self.total_rounds, 1, also="None or ")
        if self.overlap_seconds != "auto":
            _number("overlap_seconds", self.overlap_seconds, also='"auto" or ')
            if self.overlap_seconds >= (entry_s := self.round_seconds / self.n_fragments):
                raise ValueError(
                    f"overlap_seconds must be less than round_seconds / fragments = {entry_s:g}, "
                    f"got overlap_seconds={self.overlap_seconds}."
                )

    def _check_steps(self) -> None:
        """Check the arguments of rounds by steps."""
        _at_least("inner_steps", self.steps_of_round, 1)
        if self.steps_of_round % self.n_fragments:
            raise ValueError(
                f"inner_steps must be a multiple of the number of fragments, "
                f"got inner_steps={self.steps_of_round} and {self.n_fragments} fragments."
            )
        if self.overlap_steps != "auto":
            _at_least("overlap_steps", self.overlap_steps, 0, also='"auto" or ')
            if self.overlap_steps >= (steps_per_entry := self.steps_of_round // self.n_fragments):
                raise ValueError(
                    f"overlap_steps must be less than inner_steps / fragments = {steps_per_entry}, "
                    f"got overlap_steps={self.overlap_steps}."
                )
        if self.total_steps is not None:
            _at_least("total_steps", self.total_steps, 1)
            if self.total_steps < self.steps_of_round:
                raise ValueError(
                    f"total_steps must be at least inner_steps, because the first round comes after inner_steps steps: "
                    f"got total_steps={self.total_steps} and inner_steps={self.steps_of_round}."
                )

    @property
    def steps_of_round(self) -> int:
        """Inner steps from one round of a fragment to the next round of the same fragment."""
        return DEFAULT_INNER_STEPS if self.inner_steps is None else self.inner_steps

    @property
    def resolved_mean_wire(self) -> str:
        """The wire of the means."""
        return check_wires(self.wire, self.mean_wire)[1]

    @property
    def plan(self) -> RoundPlan:
        """The plan that divides the inner steps, or the time, into rounds.

        The property always returns the same object, which all parts of the DiLoCo share, because an extension of the
        run changes the plan.
        """
        if self._plan is None:
            object.__setattr__(self, "_plan", self.first_plan)
        assert self._plan is not None
        return self._plan

    @property
    def first_plan(self) -> RoundPlan:
        """The plan of the arguments alone, without any extension of the run. All replicas agree on this plan."""
        n, overlap = self.n_fragments, None if self.overlap_steps == "auto" else self.overlap_steps
        if self.round_seconds is None:
            return RoundPlan(self.steps_of_round // n, n, overlap, self.total_steps)
        entry_s, total = self.round_seconds / n, None if self.total_rounds is None else n * self.total_rounds
        share = None if self.overlap_seconds == "auto" else self.overlap_seconds / entry_s
        return RoundPlan(1, n, share, total, entry_s)

    @property
    def unit_of_total(self) -> str:
        """The name of the argument with the length of the run."""
        return "total_steps" if self.round_seconds is None else "total_rounds"

    @property
    def plan_steps_per_total(self) -> int:
        """The steps of the plan in one `unit_of_total`. By the clock, each round has one entry for each fragment."""
        return 1 if self.round_seconds is None else self.n_fragments

    @property
    def total_of_steps(self) -> int | None:
        """The planned inner steps with all extensions. None: not known, or the run has rounds by the clock."""
        return self.plan.total_steps if self.round_seconds is None else None

    @property
    def in_background(self) -> bool:
        """True if rounds run in a thread of their own while training continues."""
        return self.plan.overlaps if self.background == "auto" else self.background

    @property
    def round_interval(self) -> str:
        """The argument that determines when a round is due, and its value, as a text for messages."""
        if self.round_seconds is None:
            return f"inner_steps is {self.steps_of_round}"
        return f"round_seconds is {self.round_seconds:g}"

    @property
    def planned_rounds(self) -> int | None:
        """The number of planned rounds of each fragment. None: the total is not known."""
        n_entries = self.first_plan.n_entries
        return None if n_entries is None else n_entries // self.n_fragments

    @property
    def warmup(self) -> int:
        """The number of rounds until the outer momentum is full: the user's value, or half of the planned rounds."""
        if self.momentum_warmup != "auto":
            return self.momentum_warmup
        if self.begins_warm:
            return 0
        if self.planned_rounds is None:
            return UNKNOWN_WARMUP_ROUNDS
        return min(MAX_WARMUP_ROUNDS, max(1, self.planned_rounds // 2))

    @property
    def outer(self) -> tuple[float, float]:
        """The outer learning rate and momentum: the user's values, or the defaults for a plan of this length.

        The two values of a short plan were measured together. So if the user gives one of them, the other is the
        paper's, however long the plan is.
        """
        if self.outer_lr is None and self.outer_momentum is None:
            # By the clock, the number of steps is unknown, and no such plan was measured.
            is_by_steps = self.round_seconds is None
            return default_outer(self.steps_of_round, self.planned_rounds if is_by_steps else None)
        lr, momentum = PAPER_OUTER
        return (
            lr if self.outer_lr is None else float(self.outer_lr),
            momentum if self.outer_momentum is None else float(self.outer_momentum),
        )

    @property
    def schedule(self) -> Schedule:
        """The learning rate and the momentum of the built-in outer optimizer at each entry."""
        is_average = self.plan.is_final if self.final_average else never
        return Schedule(*self.outer, self.warmup, self.n_fragments, is_average)

    @property
    def entries_per_snapshot(self) -> int:
        """Entries from one snapshot to the next. In between, each fragment has had at least one round."""
        return max(self.snapshot_every, self.n_fragments)

    def warn_of_costly_wire(self, n_elements: int) -> None:
        """Warn of a wire that costs more time than it saves, because the store is on this machine.

        Args:
            n_elements: the number of values of all contributions of a round. Small rounds take no time either way.
        """
        if self.wire != "fp32" and n_elements >= LEAST_COSTLY_WIRE:
            warnings.warn(
                f"wire={self.wire!r}: the store is on this machine, where encoding takes longer than it saves. "
                'wire="fp32" has faster and exact rounds, unless the store is on a slow or a network disk.',
                stacklevel=3,
            )

    def warn_of_outer_settings(self, model: nn.Module) -> None:
        """Warn of outer settings that measured worse than others: docs/results/outer_settings.md has the table.

        The user's own outer optimizer was not measured, so it causes no warning.

        Args:
            model: the model. A BatchNorm with running statistics in it may cause a warning.
        """
        if self.outer_optimizer is not None:
            return
        has_short_rounds = self.round_seconds is None and self.steps_of_round < SHORT_ROUND_STEPS
        is_short = self.planned_rounds is not None and self.planned_rounds <= MEASURED_ROUNDS
        _, momentum = self.outer
        if has_short_rounds and is_short and momentum >= HIGH_MOMENTUM:
            # The user gave at least one of the two: without them, a plan as short as this has less momentum.
            given = " and ".join(name for name in ("outer_lr", "outer_momentum") if getattr(self, name) is not None)
            better_lr, better_momentum = default_outer(self.steps_of_round, self.planned_rounds)
            warnings.warn(
                f"inner_steps={self.steps_of_round} with outer_momentum={momentum:g}: many measured runs of "
                f"up to {MEASURED_ROUNDS} rounds as short as this ended worse than one replica alone. Remove {given}, "
                f"which gives outer_lr={better_lr} and outer_momentum={better_momentum}, or use inner_steps of at "
                f"least {SHORT_ROUND_STEPS}.",
                stacklevel=3,
            )
        has_final_average = self.final_average and self.planned_rounds is not None
        if momentum and not has_final_average and (name := trained_batch_norm(model)) is not None:
            # The running statistics are averaged, but the momentum moves the parameters beyond their average. Only a
            # plain average of the parameters fits the averaged statistics.
            total = "total_steps" if self.round_seconds is None else "total_rounds"
            remedy = "final_average=True" if self.planned_rounds is not None else f"{total}=…"
            warnings.warn(
                f"{name!r} is a BatchNorm, and no final average is planned: its running statistics do not fit "
                f"parameters that the outer momentum moved. Pass {remedy}, or compute the statistics again before each "
                "evaluation: torch.optim.swa_utils.update_bn(loader, model).",
                stacklevel=3,
            )

    def check_what_was_averaged(
        self, steps: int, uncounted: int, rounds: int, has_moved: Callable[[], bool], *, is_alone: bool
    ) -> None:
        """Warn at the end of training if no round has counted some steps, or if a replica that trained alone had no
        round.

        Args:
            steps: the steps of this replica.
            uncounted: the steps since the last round that counted this replica.
            rounds: the rounds of the run.
            has_moved: returns True if the model differs from the anchor.
            is_alone: True if there is no other replica. Replicas may have joined a run that was launched with one.

        Raises:
            DiLoCoError: there are other replicas, and there was no round.
        """
        if not steps and not rounds and not is_alone and not self.allow_no_rounds and has_moved():
            raise DiLoCoError(
                "The model was trained, but step() was never called, so each replica ends with a different model. Call "
                "step() after each optimizer.step(), or allow it: DiLoCo(model, allow_no_rounds=True)."
            )
        if not steps or (is_alone and rounds):
            return
        if is_alone and not self.allow_no_rounds:
            warnings.warn(
                f"{steps} step{'s' * (steps > 1)} and no round: {self.round_interval}. With other replicas this is an "
                "error.",
                stacklevel=5,
            )
        if not is_alone and not rounds and not self.allow_no_rounds:
            raise DiLoCoError(
                f"{steps} steps and no round: {self.round_interval}, so this replica has trained alone, and the "
                f"replicas end with different models. Use a smaller {self.round_interval.split()[0]}, call sync(), or "
                "allow it: "
                "DiLoCo(model, allow_no_rounds=True)."
            )
        if rounds and uncounted:
            total = "total_steps" if self.round_seconds is None else "total_rounds"
            warnings.warn(
                f"{uncounted} step{'s' * (uncounted > 1)} of this replica since its last round "
                f"{'are' if uncounted > 1 else 'is'} in no average ({self.round_interval}), and the model no longer "
                f"contains {'them' if uncounted > 1 else 'it'}. Give {total}=… to DiLoCo, so that the last round is at "
                "the last step, or call sync() before close().",
                stacklevel=5,
            )

    def agreed_settings(self) -> dict[str, Any]:
        """Return the settings that every replica must share.

        Some settings are derived from arguments. `given` has those arguments, so that an error can name the arguments
        as the user wrote them.
        """
        given = self.outer_optimizer
        if given is None:
            outer: Any = dict(zip(("outer_lr", "outer_momentum"), self.outer, strict=True))
        else:
            outer = {"outer_optimizer": getattr(given, "__qualname__", type(given).__name__)}
        by_clock: dict[str, Any] = {}
        if self.round_seconds is not None:
            by_clock = {"round_seconds": float(self.round_seconds), "total_rounds": self.total_rounds}
        return {
            **({"begun_at": self.begun_at} if self.begun_at else {}),
            "fragments": self.n_fragments,
            "wire": self.wire,
            "mean_wire": self.resolved_mean_wire,
            **({} if self.robust is None else {"robust": self.robust}),
            **by_clock,
            "inner_steps": self.steps_of_round if self.round_seconds is None else None,
            "momentum_warmup": self.warmup,
            "last_entry": self.first_plan.last_entry,
            "snapshot_every": self.entries_per_snapshot,
            "final_average": self.final_average,
            **outer,
            **({} if self.key is None else {"signed": key_id(self.key)}),
            "given": self._given(),
        }

    def _given(self) -> dict[str, Any]:
        """Return the arguments, by name, that `agreed_settings` has only in a derived form."""
        named: dict[str, Any] = {"total_steps": self.total_steps} if self.round_seconds is None else {}
        if self.outer_optimizer is None:
            named |= {"outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
        return {**named, "momentum_warmup": self.momentum_warmup, "snapshot_every": self.snapshot_every}


def trained_batch_norm(model: nn.Module) -> str | None:
    """Return the name of the first BatchNorm whose running statistics change while the model trains, or None.

    Args:
        model: any module. A BatchNorm in evaluation mode within a model in training mode does not count: it was frozen
            on purpose.
    """
    for name, module in model.named_modules():
        is_frozen = model.training and not module.training
        if isinstance(module, _BatchNorm) and module.track_running_stats and not is_frozen:
            return name or type(module).__name__
    return None


def _at_least(name: str, value: Any, least: int, also: str = "") -> None:
    """Check that an argument is an integer of at least `least`. `also` names other legal values, for the message."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {also}an integer of at least {least}, got {name}={value!r}.")
    if value < least:
        raise ValueError(f"{name} must be {also}at least {least}, got {name}={value}.")


def _number(name: str, value: Any, *, high: float | None = None, below: float | None = None, also: str = "") -> None:
    """Check that an argument is a number from 0 to `high`, or less than `below`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {also}a number, got {name}={value!r}.")
    fits = math.isfinite(value) and value >= 0
    if not fits or (high is not None and value > high) or (below is not None and value >= below):
        upper = f" and at most {high:g}" if high is not None else f" and below {below:g}" if below is not None else ""
        raise ValueError(f"{name} must be at least 0{upper}, got {name}={value}.")


def check_wires(wire: str, mean_wire: str | None) -> tuple[str, str]:
    """Return the names of the wires of contributions and of means.

    Args:
        wire: the argument `wire` of `DiLoCo`.
        mean_wire: the argument `mean_wire`. None: the default for the wire.

    Raises:
        ValueError: no wire has this name, or means cannot be encoded in it.
    """
    _one_of("wire", wire, tuple(WIRES))
    if mean_wire is None:
        return wire, DEFAULT_MEAN_WIRE[wire]
    _one_of("mean_wire", mean_wire, tuple(MEAN_WIRES))
    return wire, mean_wire


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Check that an argument is one of several texts."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {name}={value!r}.")
