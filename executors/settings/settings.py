"""`Settings`: every value that a user may set for a launch, in one frozen value with one JSON form."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Self

from executors.settings.declaration import (
    LIMITS,
    RUN,
    TESTING,
    WATCH,
    WHERE,
    Duration,
    Option,
    declared_options,
    setting,
)
from executors.settings.health_checks import shipped_checks
from executors.settings.notify import ON_HELP, kinds_text
from executors.settings.policy import NO_RESTARTS, HangLimits, Restarts
from executors.settings.procs import procs_text
from executors.settings.watch_rules import RESTART, parse_rules, rule_text, rule_texts
from executors.store.records import FAR_AHEAD, Record, flag, integer, list_of, nullable, number, parsed, text

MAX_WORLD_SIZE = 10_000
GATHER_S = 600.0
MAX_STEP = 10**15
ANY_SEED = 10**100  # random generators take no larger seed
TRACKER = re.compile(r"[\w.]{1,200}(:[\w.]{1,200})?")
NAMES = list_of(text(1000))
RULES = list_of(parsed(rule_text))
SECONDS = "is a number of seconds"


@dataclass(frozen=True, kw_only=True)
class Settings(Record):
    """The settings of a launch, as its record contains them. `launch()` describes each of them.

    The `LaunchRequest` has the entrypoint, its arguments, the environment and the store. Some of these are never
    recorded.

    Example:
        Settings.of(n=4, restarts=3).restarts  # "3"
    """

    n: int = setting(
        integer(1, MAX_WORLD_SIZE),
        option=Option(
            help="The number of replicas, from 1 to 10000. Required, unless --backend names numbers.",
            panel=RUN,
            kind=int,
            metavar="N",
            flags=("--n",),
            types=(int,),
        ),
    )
    gpu: str | None = setting(
        nullable(text(100)),
        None,
        option=Option(
            help="The GPU of each replica, as in H100 or H100:2. Default: none.",
            panel=RUN,
            metavar="GPU",
            example="H100",
            types=(str,),
            words="must be the name of a GPU, as in 'H100' or 'H100:2'",
        ),
    )
    procs: str | None = setting(
        nullable(parsed(procs_text)),
        None,
        option=Option(
            help="The number of processes of each replica, for a script with torch.distributed: N, gpu (one for each "
            "GPU of the replica) or auto (the same, and 1 without a GPU). Unlike in torchrun, auto never counts cores. "
            "Default: 1.",
            panel=RUN,
            metavar="N",
            flags=("--procs", "--nproc-per-node"),
            example="gpu",
        ),
    )
    timeout: float | None = setting(
        nullable(number(0.0, FAR_AHEAD)),
        None,
        option=Option(
            help="Time limit of each replica, as in 90s, 5m or 1h30m. Default: 1h in a cloud, the "
            "limit of the cluster on a cluster, else none.",
            panel=LIMITS,
            kind=Duration,
            metavar="DURATION",
            types=(int, float),
            words=SECONDS,
        ),
    )
    secrets: tuple[str, ...] = setting(
        NAMES,
        (),
        option=Option(
            help="The name of a secret of the backend, for the environment of the replicas. Repeatable.",
            panel=WHERE,
            kind=list[str],
            metavar="NAME",
            flags=("--secret",),
            example=["wandb"],
        ),
    )
    max_cost: float | None = setting(
        nullable(number(0.0, FAR_AHEAD)),
        None,
        option=Option(
            help="Most that all replicas may cost together, in US dollars, restarts included. It becomes a time "
            "limit, and needs a backend with prices. It does not cover `replicas add`. Default: no limit.",
            panel=LIMITS,
            kind=float,
            metavar="USD",
        ),
    )
    chaos: tuple[str, ...] = setting(
        NAMES,
        (),
        option=Option(
            help="Inject a fault on this machine, as kill:rank=1,round=3. Rounds count from 1. In place of kill: "
            "hang, raise, exit or oom. kill:every=5 kills a random replica every 5 s. "
            "store:lost=0.02,error=0.01,delay=0.3 disturbs the store. Repeatable.",
            panel=TESTING,
            kind=list[str],
            metavar="SPEC",
            example=["kill:rank=1,round=3"],
        ),
    )
    fail_fast: bool = setting(
        flag,
        False,
        option=Option(
            help="End the run if a replica fails before the first round. Default: the others continue.",
            panel=LIMITS,
            kind=bool,
        ),
    )
    min_replicas: int | None = setting(
        nullable(integer(1, MAX_WORLD_SIZE)),
        None,
        option=Option(
            help="Start with M replicas if the others do not start. The run succeeds when M have succeeded. "
            "From 1 to N. Default: N.",
            panel=LIMITS,
            kind=int,
            metavar="M",
        ),
    )
    gather_s: float = setting(
        number(0.0, FAR_AHEAD),
        GATHER_S,
        option=Option(
            help="How long --min-replicas waits for all N, as in 90s or 5m. Later replicas join. Default: 10m.",
            panel=LIMITS,
            kind=Duration,
            metavar="DURATION",
            flags=("--gather",),
        ),
    )
    restarts: str | None = setting(
        nullable(parsed(Restarts.parse)),
        None,
        option=Option(
            help="How often each replica is restarted: N, or N/1h for N in any hour. Caps for reasons or exit codes: "
            "3,oom=0,75=inf. 0: only after ends that are not its fault. preempted: only after preemptions. none: "
            "never. Default: preempted, but none with --detach.",
            panel=LIMITS,
            metavar="N,…",
            example=3,
        ),
    )
    hang_timeout: str | None = setting(
        nullable(parsed(HangLimits.of)),
        None,
        option=Option(
            help="Longest time without progress: SOFT or SOFT:HARD as in 2m:3m, auto or off. Default: auto, which is "
            "1m for an idle replica and 30m for an active one, and more if its steps are longer.",
            panel=LIMITS,
            metavar="SPAN",
            example="2m:3m",
        ),
    )
    start_timeout: str | None = setting(
        nullable(parsed(HangLimits.start_text)),
        None,
        option=Option(
            help="Longest time from the start to the first progress: a duration as in 20m, or auto. Default: "
            "auto, which follows from --hang-timeout, or is 30m without it.",
            panel=LIMITS,
            metavar="SPAN",
            example="20m",
        ),
    )
    spares: int = setting(
        integer(0, MAX_WORLD_SIZE),
        0,
        option=Option(
            help="The number of extra containers that take over for replicas that lose theirs. Needs "
            "--restarts and a cloud.",
            panel=LIMITS,
            kind=int,
            metavar="S",
        ),
    )
    health_check: str | None = setting(
        nullable(text(1000)),
        None,
        option=Option(
            help="A test that each new process runs before the task: gpu, disk, store, clock or all, or several as "
            "gpu,disk. Or a function that is called for at most 60 s: pkg.mod:f or path/file.py:f. Default: none.",
            panel=LIMITS,
            metavar="NAME",
            example="gpu",
            types=(str,),
            words="must be the names of checks or of a function, as in 'gpu,disk' or 'pkg.mod:f'",
        ),
    )
    signed: bool = setting(
        flag,
        False,
        option=Option(
            help="Accept only records made with the key of the run. This machine makes the key and keeps it.",
            panel=WHERE,
            kind=bool,
            types=(bool,),
            words="must be True or False",
        ),
    )
    from_run: str | None = setting(
        nullable(text(2000)),
        None,
        option=Option(
            help="Begin with the model and the outer momentum of another run: its id, or URL/RUN_ID. Steps begin at 0.",
            panel=RUN,
            metavar="RUN",
            flags=("--from",),
            types=(str,),
            words="must be the name of a run, as in 'first-try' or 's3://BUCKET/runs/first-try'",
        ),
    )
    from_step: int | None = setting(
        nullable(integer(0, MAX_STEP)),
        None,
        option=Option(
            help="Take the newest round of the --from run at or before step N. Default: its newest round.",
            panel=RUN,
            kind=int,
            metavar="N",
            types=(int,),
            words="must be a step of that run",
        ),
    )
    tracker: str | None = setting(
        nullable(text(400, TRACKER)),
        None,
        option=Option(
            help="Also send the numbers of the replicas to trackio, wandb, mlflow or pkg.mod:Class. Default: none.",
            panel=WATCH,
            metavar="NAME",
            example="trackio",
            types=(str,),
            words="must be a name, as in 'trackio' or 'pkg.mod:Class'",
        ),
    )
    rules: tuple[str, ...] = setting(
        RULES,
        (),
        option=Option(
            help="A condition to watch for, as in 'loss nan', 'loss > 8', 'gnorm > 10 * median for 50', 'no round "
            "10m', 'no output 30m', 'no progress 5m', 'log /REGEX/' or 'gpu < 10% 15m'. '-> stop' at its end stops "
            "the run, '-> restart' restarts the replica, and '-> notify' is the default. Repeatable. none: no rules.",
            panel=WATCH,
            kind=list[str],
            metavar="RULE",
            flags=("--rule",),
            example=["loss nan -> stop", "no round 10m"],
        ),
    )
    notify_on: str | None = setting(
        nullable(parsed(kinds_text)),
        None,
        option=Option(
            help=f"{ON_HELP} Default: all.",
            panel=WATCH,
            metavar="EVENT,…",
            example="end,given_up",
        ),
    )
    seed: int | None = setting(
        nullable(integer(-ANY_SEED, ANY_SEED)),
        None,
        option=Option(
            help="Seed each replica from the integer S and its rank. Default: not seeded.",
            panel=RUN,
            kind=int,
            metavar="S",
            types=(int,),
            words="must be an integer",
        ),
    )
    detach: bool = setting(
        flag,
        False,
        option=Option(
            help="Print the run id and return. The run continues.", panel=WATCH, kind=bool, flags=("--detach", "-d")
        ),
    )

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Return checked settings for the values that a user gave.

        Args:
            given: settings by name. `restarts` and `hang_timeout` may have any form that `launch()` takes.

        Raises:
            TypeError, ValueError: a value is not legal; the message names it.

        Example:
            Settings.of(n=8, gpu="H100", restarts=3, hang_timeout=120)
        """
        asked: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        restarts = asked.get("restarts")
        if restarts is not None and restarts != NO_RESTARTS:
            asked["restarts"] = str(Restarts.of(restarts))
        if asked.get("procs") is not None:
            asked["procs"] = procs_text(asked["procs"])
        if isinstance(on := asked.get("notify_on"), list | tuple):
            asked["notify_on"] = ",".join(map(str, on))
        if isinstance(on := asked.get("notify_on"), str):
            asked["notify_on"] = kinds_text(on)
        if isinstance(rules := asked.get("rules"), tuple) and rules:
            asked["rules"] = rule_texts(rules)
        for name in ("hang_timeout", "start_timeout"):
            if asked.get(name) is not None:
                asked[name] = str(asked[name])
        found = cls(**asked)
        found.check()
        return found

    @property
    def hang_limits(self) -> HangLimits:
        """The longest times without progress: at the start, and between two marks of progress."""
        return HangLimits.of(self.hang_timeout, self.start_timeout)

    @property
    def pays_for_start(self) -> bool:
        """True if the time limit follows from `max_cost`.

        It then counts from the start of the container, including the installation of packages.
        """
        return self.max_cost is not None

    def with_(self, **changes: Any) -> Self:
        """Return a copy with some settings changed.

        Args:
            changes: settings by name, in the form that they have in this class.

        Example:
            settings.with_(spares=0)
        """
        return replace(self, **changes)

    def with_hang_limits(self, limits: HangLimits) -> Self:
        """Return a copy with other limits on hanging.

        Args:
            limits: the new limits.

        Example:
            settings.with_hang_limits(HangLimits.of("2m", "20m"))
        """
        return self.with_(**limits.texts)

    def to_json(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, as JSON.

        Example:
            Settings.of(n=4).to_json()  # {"n": 4}
        """
        values = asdict(self)
        return {each.name: values[each.name] for each in fields(self) if values[each.name] != each.default}

    def check(self) -> None:
        """Check the values that a user gave.

        Raises:
            TypeError, ValueError: a value is not legal; the message names it.
        """
        if self.n is None:
            raise TypeError("launch() needs n, the number of replicas: launch('local', 'm:f', n=4).")
        if isinstance(self.n, bool) or not isinstance(self.n, int):
            raise TypeError(f"n must be an integer, got n={self.n!r}.")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got n={self.n!r}.")
        if self.n > MAX_WORLD_SIZE:
            raise ValueError(f"n must be at most {MAX_WORLD_SIZE}, got n={self.n!r}.")
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if option.words and value is not None and not isinstance(value, option.types):
                raise TypeError(f"{name} {option.words}, got {value!r}.")
        for name in ("secrets", "chaos", "rules"):
            if isinstance(value := getattr(self, name), str):
                raise TypeError(f"{name} must be a list of strings, as in [{value!r}], got a string.")
        if self.max_cost is not None and not (isinstance(self.max_cost, int | float) and self.max_cost > 0):
            raise ValueError(f"max_cost must be a number of US dollars above 0, got max_cost={self.max_cost!r}.")
        if self.min_replicas is not None and not (type(self.min_replicas) is int and 1 <= self.min_replicas <= self.n):
            raise ValueError(f"min_replicas must be from 1 to n={self.n}, got min_replicas={self.min_replicas!r}.")
        if not isinstance(self.gather_s, int | float) or not 0 <= self.gather_s < FAR_AHEAD:
            raise ValueError(f"gather_s must be a number of seconds, got gather_s={self.gather_s!r}.")
        if self.health_check is not None:
            shipped_checks(self.health_check)
        if self.notify_on is not None:
            if not isinstance(self.notify_on, str):
                raise TypeError(f"notify_on must be the names of events, as in 'end,given_up', got {self.notify_on!r}.")
            kinds_text(self.notify_on)
        if self.rules:
            self._check_rules()
        self.hang_limits  # noqa: B018 - raises ValueError where a text is not a limit
        if type(self.spares) is not int or not 0 <= self.spares <= MAX_WORLD_SIZE:
            raise ValueError(f"spares must be a number from 0 to {MAX_WORLD_SIZE}, got spares={self.spares!r}.")
        if self.from_step is not None and (self.from_run is None or self.from_step < 0):
            raise ValueError(
                f"from_step (--from-step) must be at least 0, and needs from_run (--from), the run with this step: got "
                f"from_step={self.from_step} and from_run={self.from_run!r}."
            )

    def _check_rules(self) -> None:
        """Check that a rule that ends attempts also leads to restarts."""
        policy = Restarts.of(self.restarts)
        for rule in parse_rules(self.rules):
            if rule.action != RESTART:
                continue
            if policy is None or not policy.answers("rule", was_refused=False):
                raise ValueError(
                    f"Rule {str(rule)!r} needs restarts (--restarts), as in --restarts 3. Without it, write "
                    f"'{rule.condition} -> stop'."
                )
            _, cap = policy.cap("rule", None)
            if cap <= 0 or (policy.per_replica <= 0 and cap != math.inf):
                raise ValueError(
                    f"Rule {str(rule)!r} can restart nothing, because restarts={str(policy)!r} allows no restart after "
                    "a broken rule. Give a larger number, as in --restarts 3."
                )


OPTIONS: Mapping[str, Option] = declared_options(Settings)
"""How users give each setting, by the names of the fields."""
DEFAULTS: Mapping[str, Any] = {
    each.name: None if each.default is MISSING else each.default for each in fields(Settings)
}
"""The default of each setting. `n` has none, so it is None here."""
