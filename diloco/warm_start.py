"""Lets a new run begin with the model and the outer momentum of another run (`--from RUN`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.errors import ContributionError
from diloco.extra_tensors import ExtraTensorsModule
from diloco.model_state import ModelState
from diloco.outer_optimizer import OptimizerFactory
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.run_location import RunLocation
from diloco.rendezvous.stored_log import StoredRoundLog
from diloco.rendezvous.training_state import Array, Arrays, shape_difference
from diloco.trained_model import ModelSource, open_log, read_state
from executors.errors import RunNotFoundError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmStart:
    """The state of another run that a new run begins with.

    Args:
        source: the other run.
        step: a step of the other run. The state after the newest round at or before it is used. None: the state after
            the newest round.
        state: the state of the new run. The state of the other run must fit its model.
        rank: this replica, for log lines and errors.

    Example:
        WarmStart(source, None, model_state, rank=0).read()
    """

    source: ModelSource
    step: int | None
    state: ModelState
    rank: int

    @property
    def has_source(self) -> bool:
        """True if the other run has a DiLoCo of this name."""
        try:
            open_log(self.source)
        except RunNotFoundError:
            return False
        return True

    def check(self) -> None:
        """Check that the other run trained the parameters that this model trains. It costs one small read.

        Raises:
            ContributionError: parameters are missing there, have another shape there, or are frozen here. The message
                names the first one.
            RunNotFoundError: the other run has no DiLoCo of this name.
            CorruptObjectError: the other run's state cannot be read.
        """
        self._check(open_log(self.source))

    def _check(self, log_of_source: StoredRoundLog) -> None:
        theirs, who = log_of_source.agreed.tensors, f"run {self.source.run_id!r}"
        problems: list[str] = []
        for fragment in self.state.fragments:
            for slot in fragment.slots:
                if slot.name in theirs and theirs[slot.name][0] != slot.shape:
                    problems.append(shape_difference(slot.name, theirs[slot.name][0], slot.shape))
                elif slot.name not in theirs and slot.kind == "parameter":
                    problems.append(f"{slot.name!r} of shape {slot.shape} is missing there")
        more = self.state.unshared.more
        problems += [
            f"{name!r} is trained there and frozen here"
            for name in theirs
            if name in more and more[name].kind == "frozen"
        ]
        if problems:
            others = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise ContributionError(
                f"Rank {self.rank}: this model cannot start from {who}: {problems[0]}{others}. To load only the "
                "tensors that fit, load this file in the script: "
                f"replicas model {self.source.run_id} --out model.safetensors"
            )

    def read(self) -> Arrays:
        """Read the state that the new run begins with.

        Raises:
            DiLoCoError: the other run no longer has a round at this step.
            ContributionError: the state does not fit this model.
            CorruptObjectError: the state cannot be read.
        """
        settings = self.state.settings
        found = read_state(self.source, step=self.step, outer_optimizer=self._same_optimizer(settings.outer_optimizer))
        self._check(found.log)
        theirs, mine = found.state.arrays(), self.state.arrays()
        arrays: dict[str, Array] = {name: values for name, values in mine.items() if name.startswith("anchor/")}
        kept = [name for name in arrays if name not in theirs]
        arrays |= {name: values for name, values in theirs.items() if name in arrays or self._is_outer(name, found.log)}
        at = f"round {found.state.position}" + (f", step {found.step}," if found.step is not None else "")
        notes = [*found.notes]
        if kept:
            notes.append(
                f"It lacks {kept[0].removeprefix('anchor/')!r}, which keeps its own values ({len(kept)} such)."
            )
        left = [name for name in found.log.agreed.tensors if f"anchor/{name}" not in arrays]
        if left:
            notes.append(f"{left[0]!r} is not loaded, because this run does not average it ({len(left)} such).")
        log.warning(
            "rank %s: starts from %s of run %s, at its own step 0. %s",
            self.rank,
            at,
            self.source.run_id,
            " ".join(notes),
        )
        return arrays

    def _same_optimizer(self, given: OptimizerFactory | None) -> OptimizerFactory | None:
        """Return this run's outer optimizer if the other run's has the same name. Otherwise return None."""
        named = open_log(self.source).agreed.outer_optimizer
        return given if given is not None and named == getattr(given, "__qualname__", type(given).__name__) else None

    def _is_outer(self, name: str, log_of_source: StoredRoundLog) -> bool:
        """Return True if an array of the other run's state is outer state that this run can use."""
        if name.startswith("momentum/"):
            return self.state.settings.outer_optimizer is None
        agreed = log_of_source.agreed
        mine: Mapping[str, int] = {slot.name: f.index for f in self.state.fragments for slot in f.slots}
        is_same = mine == {tensor: fragment for tensor, (_, _, fragment) in agreed.tensors.items()}
        given = self._same_optimizer(self.state.settings.outer_optimizer)
        return name.startswith("outer/") and is_same and given is not None


def find_warm_start(location: RunLocation, store: RetryingStore, keys: Keys, state: ModelState) -> WarmStart | None:
    """Return the state that this run begins with. None: it begins with a replica's own model, or has begun already.

    Every replica checks that the state fits its model. So all of them fail at once, and none waits for the others.

    Args:
        location: the run of this replica.
        store: the store of the run.
        keys: the keys of its rendezvous.
        state: the state of the new run. The state of the other run must fit its model.

    Raises:
        ContributionError: the other run's state does not fit.
        RunNotFoundError: the other run has no DiLoCo of this name.
        CorruptObjectError: the other run's state cannot be read.

    Example:
        find_warm_start(find_location(None, None, None, None), store, keys, state)
    """
    if not location.begins_warm or location.origin is not None or store.exists(keys.snapshot(0)):
        return None
    assert location.replica is not None
    found = location.replica.starts_from
    assert found is not None
    key = state.settings.key
    source = ModelSource(store=found.store, run_id=found.run_id, name=keys.name, key=key, extensions=found.extensions)
    warm_start = WarmStart(source, found.step, state, state.rank)
    if isinstance(state.model, ExtraTensorsModule) and not warm_start.has_source:
        return None  # that run averaged only its model, so these additional tensors begin with the script's values
    warm_start.check()
    return warm_start
