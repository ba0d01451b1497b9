"""Every error of `diloco`; all of them are `executors.errors.ReplicasError` too.

    DiLoCoError                      training together failed
    ├── QuorumTimeoutError           also TimeoutError; names the missing ranks
    ├── ContributionError            names, shapes, dtypes or finiteness; also ValueError
    ├── DuplicateWorkError           several replicas train on the same data
    ├── StaleCopyError               an optimizer undid a round
    ├── DivergenceError              two anchors for one round
    ├── FencedError                  a newer attempt owns this rank
    └── AbortedError                 a peer aborted the run

Bad constructor arguments raise `ValueError` or `TypeError` before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Self

from executors.errors import ReplicasError


class DiLoCoError(ReplicasError):
    """Training together failed."""


class QuorumTimeoutError(DiLoCoError, TimeoutError):
    """A round (`round`: 1, 2, 3, …) was not decided, or its mean not published, in time."""

    def __init__(self, message: str, *, round: int | None = None, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.round = round
        self.missing = list(missing)


class ContributionError(DiLoCoError, ValueError):
    """A model does not fit the run, or its parameters are not finite."""


class DuplicateWorkError(DiLoCoError):
    """Other replicas send the same work, round after round: they train on the same data."""


class StaleCopyError(DiLoCoError):
    """An optimizer keeps a copy of the weights and put a parameter back to its value before a round.

    Example:
        try:
            diloco.step()
        except StaleCopyError as error:
            print(error)  # names the parameter, the optimizer and the remedy
    """


class DivergenceError(DiLoCoError):
    """This replica's anchor is not the run's, also after reloading it."""


class FencedError(DiLoCoError):
    """A newer attempt owns this rank."""

    outcome_reason = "fenced"


class AbortedError(DiLoCoError):
    """A peer aborted the run."""

    @classmethod
    def from_record(cls, run_id: str, record: bytes) -> Self:
        """Return the error that names who aborted the run and why, as far as the record can be read."""
        try:
            fields = json.loads(record)
            why = f"{fields['who']}: {fields['why']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            why = record[:500].decode(errors="replace")
        return cls(f"Run {run_id!r} was aborted: {why[:500]}")
