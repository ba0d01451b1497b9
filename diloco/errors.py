"""The errors of `diloco`. Each is also an `executors.errors.ReplicasError`.

    DiLoCoError                      a call or a state in which training together cannot continue
    ├── QuorumTimeoutError           a round took too long; also TimeoutError
    ├── ContributionError            the model does not fit the run, or is not finite; also ValueError
    ├── DuplicateWorkError           several replicas train on the same data
    ├── StaleCopyError               an optimizer undid a round
    ├── DivergenceError              two anchors for one round
    ├── FencedError                  a newer attempt owns this rank
    └── AbortedError                 another replica aborted the run

Wrong arguments of a constructor raise `ValueError` or `TypeError` before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Self

from executors.errors import ReplicasError


class DiLoCoError(ReplicasError):
    """Replicas cannot train together, or a DiLoCo was used in a way that cannot work.

    Cause: for example a call after `close()`, training without any round, or `steps()` without a planned end.

    Remedy: the message names the remedy. All other errors of this module are subclasses.

    Example:
        except DiLoCoError as error:
            print(error)
    """


class QuorumTimeoutError(DiLoCoError, TimeoutError):
    """A round was not decided, or its mean was not available, within `round_timeout_s` seconds.

    Cause: too few replicas are left for `min_quorum`, they are slower than `round_timeout_s`, or the store is damaged.

    Remedy: `replicas status RUN` shows the missing ranks, and `replicas resume RUN` starts them again. Give a larger
    `round_timeout_s` for slow replicas, or a smaller `min_quorum`.

    Args:
        message: The text of the error.
        round: The number of the round: 1, 2, 3, …. None: the first anchor.
        missing: The ranks that sent no contribution.

    Example:
        except QuorumTimeoutError as error:
            print(error.round, error.missing)
    """

    def __init__(self, message: str, *, round: int | None = None, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.round = round
        self.missing = list(missing)


class ContributionError(DiLoCoError, ValueError):
    """A model or its settings do not fit the run, or a parameter is not finite.

    Cause: names, shapes, dtypes or arguments of `DiLoCo` differ from the other replicas. Or the loss has diverged, or
    a `weight` function has returned a number that is not positive.

    Remedy: the message names the first difference. If a value is not finite, lower the learning rate or clip gradients.

    Example:
        except ContributionError as error:
            print(error)  # names the parameter and both shapes
    """


class DuplicateWorkError(DiLoCoError):
    """Other replicas sent the same work as this one in three rounds in a row, bit for bit.

    Cause: they train on the same data in the same order, so all but one of them add nothing.

    Remedy: `replica.shard(dataset)` or `replica.seed`. `same_data="allow"` if it is intended.

    Example:
        DiLoCo(model, same_data="allow")  # raises no DuplicateWorkError
    """


class StaleCopyError(DiLoCoError):
    """The optimizer set a parameter back to its value before a round.

    Cause: the optimizer keeps a copy of the weights, such as float32 master weights, and writes the copy into the
        model.

    Remedy: after each round, copy the parameters into the optimizer's copy, or create the optimizer again.
    Examples are in docs/explanation/what-does-not-fit.md.

    Example:
        try:
            diloco.step()
        except StaleCopyError as error:
            print(error)  # names the parameter, the optimizer and the remedy
    """


class DivergenceError(DiLoCoError):
    """This replica's anchor differs from the run's anchor, also after it was loaded again.

    Cause: memory or a stored snapshot is damaged, or an outer optimizer of your own computes other bits on this
    machine.

    Remedy: start the replica again on another machine. With an outer optimizer of your own, use one kind of processor.

    Example:
        except DivergenceError:
            raise SystemExit(1)  # the supervisor starts the next attempt
    """


class FencedError(DiLoCoError):
    """A newer attempt of this rank has begun, so this process must end.

    Cause: the supervisor, or the user, started the rank again because this process seemed to be lost.

    Remedy: none is needed. The newer attempt continues the work.

    Example:
        except FencedError:
            raise  # let the process end
    """

    outcome_reason = "fenced"


class AbortedError(DiLoCoError):
    """Another replica aborted the run, so all of them end.

    Cause: the message has the rank that aborted the run, and its reason.

    Remedy: remove that cause, then start a new run, or `replicas resume RUN --from-snapshot`.

    Example:
        except AbortedError as error:
            print(error)
    """

    @classmethod
    def from_record(cls, run_id: str, record: bytes) -> Self:
        """Return the error that names the replica that aborted the run, and its reason, as far as the record can be
        read.

        Args:
            run_id: the run.
            record: the stored record, which may be damaged.
        """
        try:
            fields = json.loads(record)
            why = f"{fields['who']}: {fields['why']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            why = record[:500].decode(errors="replace")
        return cls(f"Run {run_id!r} was aborted: {why[:500]}")
