"""Derives the scenario of a schedule of restarts from its seed: the run, outcomes, controllers and faults."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

from executors.settings.policy import Restarts
from simulation.world import Faults

ENDS: dict[str, dict[str, Any]] = {
    "succeeded": {},
    "raises": {"reason": "exception", "fingerprint": "a", "exit_code": 1},
    "raises otherwise": {"reason": "exception", "exit_code": 1},
    "signal": {"reason": "signal", "signal": "SIGKILL", "exit_code": -9},
    "segfault": {"reason": "signal", "signal": "SIGSEGV", "exit_code": -11, "fingerprint": "SIGSEGV"},
    "oom": {"reason": "oom", "exit_code": -9},
    "hang": {"reason": "hang", "exit_code": -9},
    "free": {"reason": "no_result", "exit_code": 75},
    "timeout": {"reason": "timeout", "exit_code": -15},
}
"""By the kind of end of the user's code, the fields of its outcome."""
DECIDES = ("cancel", "stop", "resume", "policy")
parse = functools.cache(Restarts.parse)


@dataclass(frozen=True)
class OutsideEvent:
    """An action of the user, or a kill by the service, at a time."""

    at_s: float
    what: str
    rank: int | None
    policy: str = ""


@dataclass(frozen=True)
class RestartScenario:
    """The parameters of one schedule. The seed determines all of them."""

    seed: int
    n_ranks: int = 2
    policy: str | None = "2,backoff=1s:8s"
    min_replicas: int | None = None
    n_controllers: int = 1
    """The number of controllers outside the run. One more starts when the faults end."""
    is_shared: bool = False
    """True if one supervisor has all ranks, as on one machine."""
    ends: tuple[str, ...] = tuple(ENDS)
    life_s: tuple[float, float] = (1.0, 30.0)
    saves: float = 0.3
    """The probability that an attempt saves progress that its successor need not repeat."""
    progresses: float = 0.7
    """The probability that an attempt reports progress."""
    copies: float = 0.05
    """The probability that the service starts a second copy of a container."""
    lies: float = 0.0
    """The probability, before the faults end, that the service reports a live container as gone."""
    has_wider: bool = False
    """True if a supervisor leaves a rank to a controller outside the run after two strikes."""
    skew_s: float = 0.0
    """The largest difference between the clocks of processes."""
    restartable: float = 0.0
    """The probability that a process stays after an exception of its code, to run the next attempt."""
    acts: tuple[OutsideEvent, ...] = ()
    faults: Faults = field(default_factory=lambda: Faults(until_s=0.0))

    @classmethod
    def from_seed(cls, seed: int) -> RestartScenario:
        dice = random.Random(seed)
        n_ranks = dice.randint(1, 3)
        until_s = dice.choice([20.0, 60.0, 120.0])
        acts = []
        for _ in range(dice.choice([0, 1, 1, 2, 3])):
            what = dice.choice((*DECIDES, "cancel", "resume", "kill", "kill"))
            rank = dice.choice([None, dice.randrange(n_ranks)])
            acts.append(OutsideEvent(dice.uniform(0.0, until_s), what, rank, _policy(dice)))
        rate = dice.choice([0.0, 0.01, 0.03])
        faults = Faults(
            lost_reply=rate * dice.random(),
            refused=rate * dice.random(),
            lands_later=rate * dice.random(),
            stale=rate * dice.random(),
            slow=rate * dice.random(),
            asleep=0.3 * rate * dice.random(),
            dies=dice.choice([0.0, 0.01, 0.03]),
            deaths_left=dice.randint(0, 4),
            until_s=until_s,
        )
        return cls(
            seed=seed,
            n_ranks=n_ranks,
            policy=None if dice.random() < 0.05 else _policy(dice),
            min_replicas=dice.randint(1, n_ranks) if dice.random() < 0.4 else None,
            n_controllers=dice.randint(0, 2),
            is_shared=dice.random() < 0.3,
            ends=tuple(dice.sample([*ENDS], dice.randint(1, 4))) + ("succeeded",) * dice.randint(0, 2),
            life_s=(0.5, dice.choice([1.0, 10.0, 40.0])),
            saves=dice.choice([0.0, 0.3, 1.0]),
            progresses=dice.choice([0.0, 0.7, 1.0]),
            copies=dice.choice([0.0, 0.0, 0.1]),
            lies=dice.choice([0.0, 0.0, 0.02]),
            has_wider=dice.random() < 0.3,
            skew_s=dice.choice([0.0, 0.0, 5.0]),
            restartable=dice.choice([0.0, 0.0, 0.5, 1.0]),
            acts=tuple(sorted(acts, key=lambda act: act.at_s)),
            faults=faults,
        )


EXTRAS = ("oom=0", "-9=1", "timeout=2", "run=2", "within=60s", "no_progress=1", "together", "together", "how=launch")


def _policy(dice: random.Random) -> str:
    parts = [f"{dice.choice([0, 1, 2, 3, 3])}" + dice.choice(["", "", "", "/30s"]), "75=inf"]
    parts += dict.fromkeys(dice.sample(EXTRAS, dice.choice([0, 0, 1, 2])))
    return ",".join([*parts, dice.choice(["backoff=1s:8s", "backoff=0s", "backoff=4s:30s"])])
