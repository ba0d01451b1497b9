"""Parses and checks the rules for replicas that end or hang: `--restarts`, `--hang-timeout` and `--start-timeout`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Self

from executors.errors import unknown_name
from executors.protocol import REASONS
from executors.settings.durations import parse_duration

DEFAULT_CAPS: Mapping[str, float] = {"preempted": math.inf, "timeout": 0, "result_not_serializable": 0, "oom": 1}
ONLY_PREEMPTED, NO_RESTARTS = "preempted", "none"
NEVER_RESTARTED = ("cancelled", "stopped", "fenced")
HOWS = ("fork", "launch")
MAX_RESTARTS = 1_000_000  # more than a run ever has: a rank ends with an error after 10,000 attempts
LEAST_S, MAX_S = 0.001, 1e8
DEFAULT_START_S = 1800.0
"""Seconds that a replica may be idle before its first mark of progress."""
# Without start_timeout, the limit on the start is this factor times the hard limit, and at least this many seconds.
LEAST_START_S, START_FACTOR = 60.0, 5.0
EXIT_CODE = re.compile("0|-?[1-9][0-9]{0,9}")
SETTINGS = ("run", "backoff", "no_progress", "within", "together", "how")


@dataclass(frozen=True)
class Restarts:
    """The restart policy: the ends of replicas that lead to a restart, and the limits on restarts.

    Raises:
        ValueError: a value is not legal.

    Example:
        Restarts(3, per_s=3600.0)
    """

    per_replica: int = 3
    """The largest number of charged restarts of a replica, in all or in any `per_s` seconds. 0: only restarts that are
    not charged.
    """
    _: KW_ONLY
    per_s: float | None = None
    """The span in seconds in which `per_replica` counts. None: the whole run."""
    run: int | None = None
    """The largest number of charged restarts of the whole run. None: only the limit of each replica counts."""
    reasons: Mapping[str, float] = field(default_factory=dict)
    """The largest number of restarts after single reasons, or after exit codes given as texts. They replace those in
    `DEFAULT_CAPS`. `inf`: such a restart is not charged.
    """
    backoff_s: tuple[float, float] = (1.0, 60.0)
    """The seconds to wait before a restart: the first wait after an attempt without progress, and the longest wait. The
    wait doubles with each such attempt.
    """
    no_progress: int = 3
    """The number of attempts in a row that may end without progress."""
    within_s: float | None = None
    """The seconds after the launch from which no restart is made. None: no limit."""
    together: bool = False
    """True if each restart starts all ranks again. Use it for replicas that communicate with each other outside
    DiLoCo.
    """
    only_preempted: bool = False
    """True if only replicas are restarted whose machine the service took back. This is the policy of a launch that asks
    for no restarts.
    """
    nothing: bool = False
    """True if no end leads to a restart, not even a preemption. In the log of decisions, such a policy replaces an
    earlier one.
    """
    how: str = "fork"
    """The least start that is used. "fork" starts a new process in the same place, and "launch" starts a new container
    or supervisor.
    """

    def __post_init__(self) -> None:
        for name, least, value in (
            ("per_replica", 0, self.per_replica),
            ("run", 0, self.run),
            ("no_progress", 1, self.no_progress),
        ):
            if value is not None and not (type(value) is int and least <= value <= MAX_RESTARTS):
                raise ValueError(f"restarts: {name} must be from {least} to {MAX_RESTARTS:,}, got {value!r}.")
        if self.how not in HOWS:
            raise ValueError("restarts: " + unknown_name("way", self.how, HOWS))
        for reason, cap in self.reasons.items():
            _check_reason(reason, cap)
        first_s, longest_s = self.backoff_s
        if not 0 <= first_s <= longest_s <= MAX_S:
            raise ValueError(f"restarts: backoff must be FIRST:LONGEST in seconds, as in 1s:60s, got {self.backoff_s}.")
        for name, span in (("the window", self.per_s), ("within", self.within_s)):
            if span is not None and not LEAST_S <= span <= MAX_S:
                raise ValueError(f"restarts: {name} must be at least {LEAST_S} s, got {span:g} s.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a policy such as `3`, `3/1h`, `preempted`, `none`, or
        `3,oom=0,timeout=2,75=inf,run=10,backoff=1s:60s,no_progress=3,within=8h,together`.

        Args:
            text: the text.

        Raises:
            ValueError: the text is not a policy. The message names the wrong part, and a legal form.

        Example:
            Restarts.parse("3/1h,oom=0").per_replica  # 3
        """
        if text.strip() == ONLY_PREEMPTED:
            return cls(0, only_preempted=True)
        if text.strip() == NO_RESTARTS:
            return cls(0, nothing=True)
        first, *rest = (part.strip() for part in text.split(","))
        values: dict[str, Any] = {"reasons": {}}
        count, slash, window = first.partition("/")
        values["per_replica"] = _count(count, text)
        if slash:
            values["per_s"] = parse_duration(window)
        seen = set()
        for part in rest:
            name, equals, value = part.partition("=")
            if name in seen:
                raise ValueError(f"restarts: {name!r} is given twice in {text!r}.")
            seen.add(name)
            if name == "together":
                if equals:
                    raise ValueError(f"Write {name!r} in restarts without a value, got {part!r}.")
                values["together"] = True
            elif not equals or not value:
                raise ValueError(f"restarts: {part!r} needs a value, as in oom=1.")
            elif name in ("run", "no_progress"):
                values[name] = _integer(value, name)
            elif name == "within":
                values["within_s"] = parse_duration(value)
            elif name == "backoff":
                low, _, high = value.partition(":")
                values["backoff_s"] = (parse_duration(low), parse_duration(high or low))
            elif name == "how":
                values["how"] = value
            elif name in REASONS or EXIT_CODE.fullmatch(name):
                values["reasons"][name] = math.inf if value == "inf" else _integer(value, name)
            else:
                raise ValueError("restarts: " + unknown_name("reason or setting", name, (*SETTINGS, *_CAPPED)))
        return cls(**values)

    @classmethod
    def of(cls, asked: Restarts | int | str | None) -> Restarts | None:
        """Return the policy that a user gives in any of its forms.

        Args:
            asked: a policy, the number of restarts of each replica, a text as for `parse`, or None for no policy.

        Raises:
            TypeError: the value has another type.
            ValueError: the number or the text is not legal.

        Example:
            Restarts.of(3) == Restarts.parse("3")  # True
        """
        if asked is None or isinstance(asked, Restarts):
            return asked
        if isinstance(asked, bool) or not isinstance(asked, int | str):
            raise TypeError(f"restarts must be a number, a text such as '3/1h,oom=0', or a Restarts, got {asked!r}.")
        return cls.parse(str(asked))

    def answers(self, reason: str | None, *, was_refused: bool) -> bool:
        """Return True if the policy may restart a replica after such an end.

        Args:
            reason: the reason of the end.
            was_refused: True if the attempt was not started because its service had no machine.

        Example:
            Restarts.parse("preempted").answers("exception", was_refused=False)  # False
        """
        return not self.nothing and (not self.only_preempted or reason == "preempted" or was_refused)

    def __str__(self) -> str:
        if self.only_preempted:
            return ONLY_PREEMPTED
        if self.nothing:
            return NO_RESTARTS
        parts = [str(self.per_replica) + ("" if self.per_s is None else f"/{_seconds(self.per_s)}")]
        parts += [f"{name}={'inf' if cap == math.inf else int(cap)}" for name, cap in self.reasons.items()]
        parts += [] if self.run is None else [f"run={self.run}"]
        if self.backoff_s != (1.0, 60.0):
            parts.append(f"backoff={_seconds(self.backoff_s[0])}:{_seconds(self.backoff_s[1])}")
        parts += [] if self.no_progress == 3 else [f"no_progress={self.no_progress}"]
        parts += [] if self.within_s is None else [f"within={_seconds(self.within_s)}"]
        parts += ["together"] if self.together else []
        parts += [] if self.how == "fork" else [f"how={self.how}"]
        return ",".join(parts)

    def cap(self, reason: str | None, exit_code: int | None) -> tuple[str | None, float]:
        """Return the limit on restarts after such an end, and the exit code or reason to which the limit belongs.

        The second value is None if this kind of end has no limit of its own. Then the limit of the replica counts.

        Args:
            reason: the reason of the end, if it is known.
            exit_code: the exit code of the process, if it is known.

        Example:
            Restarts.parse("3,oom=0").cap("oom", None)  # ("oom", 0)
        """
        caps = {**DEFAULT_CAPS, **self.reasons}
        return next(
            ((name, caps[name]) for name in (str(exit_code), str(reason)) if name in caps), (None, MAX_RESTARTS)
        )


def supervised(restarts: str | None) -> str | None:
    """Return the policy that a replica's own supervisor applies. None: it restarts nothing and ends no hung replica.

    If a service takes back a machine, the supervisor ends, too. So processes on other machines carry out a policy that
    only restarts preempted replicas.

    Args:
        restarts: the run's policy, as recorded.

    Example:
        supervised("preempted")  # None
    """
    return None if restarts in (ONLY_PREEMPTED, NO_RESTARTS) else restarts


@dataclass(frozen=True)
class HangLimits:
    """How long a replica may run without progress: `--hang-timeout` and `--start-timeout`.

    Args:
        soft_s: seconds without a mark of progress until the stacks are recorded and `HangError` is raised. None: the
            limits depend on the replica's earlier pauses ("auto").
        hard_s: seconds without a mark of progress until the process is killed. None if and only if `soft_s` is None.
        is_off: True if no limit applies between marks of progress.
        start_s: seconds from the start of an attempt to its first mark of progress. None: it follows from `hard_s`, or
            from the default.

    Example:
        HangLimits.of("2m:3m", "20m").start_limit_s
    """

    soft_s: float | None = None
    hard_s: float | None = None
    is_off: bool = False
    start_s: float | None = None

    @classmethod
    def of(cls, hang_timeout: str | float | None = None, start_timeout: str | float | None = None) -> Self:
        """Return the limits that a user asked for.

        Args:
            hang_timeout: `auto`, `off`, `SOFT` or `SOFT:HARD`; a number alone has a hard limit of one and a half times
                it. None: `auto`.
            start_timeout: seconds, a duration such as `20m`, or `auto`. None: `auto`.

        Raises:
            ValueError: one of the values is not legal.

        Example:
            HangLimits.of("2m:3m", "20m")
        """
        found = cls._of_marks(hang_timeout)
        if start_timeout is None or start_timeout == "auto":
            return found
        try:
            start_s = parse_duration(str(start_timeout))
        except ValueError:
            start_s = math.nan
        if not LEAST_S <= start_s <= MAX_S:
            raise ValueError(
                f"start_timeout must be a duration of at least {LEAST_S} s, as in 20m, or auto, "
                f"got {str(start_timeout)!r}."
            )
        return replace(found, start_s=start_s)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the form that records contain and `str` returns, as `120s:180s,start=1200s`.

        Args:
            text: the limits of a run, as recorded.

        Raises:
            ValueError: the text does not have this form.

        Example:
            HangLimits.parse("auto,start=1200s")
        """
        marks, comma, start = str(text).partition(",")
        name, equals, start_s = start.partition("=")
        if comma and (name, equals) != ("start", "="):
            raise ValueError(f"limits on hanging must be written as in 120s:180s,start=1200s, got {text!r}.")
        return cls.of(marks, start_s if comma else None)

    @classmethod
    def start_text(cls, start_timeout: str) -> str:
        """Return a limit on the start in the form that records contain: `auto`, or seconds.

        Args:
            start_timeout: seconds, a duration such as `20m`, or `auto`.

        Raises:
            ValueError: the text is not such a limit.

        Example:
            HangLimits.start_text("20m")  # "1200s"
        """
        start_s = cls.of(start_timeout=start_timeout).start_s
        return "auto" if start_s is None else _seconds(start_s)

    @property
    def texts(self) -> dict[str, str | None]:
        """These limits in the form of the settings `hang_timeout` and `start_timeout`."""
        marks, _, _ = str(self).partition(",")
        return {"hang_timeout": marks, "start_timeout": None if self.start_s is None else _seconds(self.start_s)}

    def changed(self, hang_timeout: str | float | None = None, start_timeout: str | float | None = None) -> Self:
        """Return a copy of these limits with other values.

        Args:
            hang_timeout: `auto`, `off`, `SOFT` or `SOFT:HARD`. None: unchanged.
            start_timeout: seconds, a duration such as `20m`, or `auto`. None: unchanged.

        Raises:
            ValueError: one of the values is not legal.

        Example:
            HangLimits.of("2m", "20m").changed(start_timeout="1h")
        """
        asked = self.of(hang_timeout, start_timeout)
        marks = self if hang_timeout is None else asked
        return replace(marks, start_s=self.start_s if start_timeout is None else asked.start_s)

    @classmethod
    def _of_marks(cls, asked: str | float | None) -> Self:
        if asked is None or asked == "auto":
            return cls()
        if asked == "off":
            return cls(is_off=True)
        soft, colon, hard = str(asked).partition(":")
        try:
            soft_s = parse_duration(soft)
            hard_s = parse_duration(hard) if colon else 1.5 * soft_s
        except ValueError:
            raise ValueError(
                f"hang_timeout must be SOFT, SOFT:HARD, auto or off, as in 2m:3m, got {str(asked)!r}."
            ) from None
        if not LEAST_S <= soft_s <= hard_s <= MAX_S:
            raise ValueError(
                f"hang_timeout: the soft limit must be at least {LEAST_S} s and at most the hard limit, "
                f"got {str(asked)!r}."
            )
        return cls(soft_s, hard_s)

    @property
    def are_explicit(self) -> bool:
        """True if the user gave a number for the time between two marks.

        Such a limit ends a replica even without restarts.
        """
        return self.soft_s is not None

    @property
    def start_limit_s(self) -> float | None:
        """The seconds from the start of an attempt to its first mark.

        None if no number was given or follows from the others.

        Before its first step, a replica imports modules, compiles and reads data. This takes longer than a step. So the
        limit follows from HARD, and is never shorter than HARD.
        """
        if self.start_s is not None or self.hard_s is None:
            return self.start_s
        return max(self.hard_s, min(DEFAULT_START_S, max(LEAST_START_S, START_FACTOR * self.hard_s)))

    def __str__(self) -> str:
        if self.soft_s is None or self.hard_s is None:
            marks = "off" if self.is_off else "auto"
        else:
            marks = f"{_seconds(self.soft_s)}:{_seconds(self.hard_s)}"
        return marks if self.start_s is None else f"{marks},start={_seconds(self.start_s)}"


_CAPPED = tuple(reason for reason in REASONS if reason not in NEVER_RESTARTED)


def _check_reason(reason: str, cap: float) -> None:
    if reason in NEVER_RESTARTED:
        raise ValueError(f"restarts: a replica that ended as {reason} is never restarted, so remove {reason}=.")
    if not EXIT_CODE.fullmatch(reason) and reason not in _CAPPED:
        raise ValueError("restarts: " + unknown_name("reason", reason, _CAPPED))
    if not (cap == math.inf or (0 <= cap <= MAX_RESTARTS and cap == int(cap))):
        raise ValueError(f"restarts: {reason}= must be from 0 to {MAX_RESTARTS:,}, or inf, got {cap}.")


def _seconds(seconds: float) -> str:
    """Return a time in a form that `parse_duration` reads."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def _count(text: str, policy: str) -> int:
    """Return the number at the begin of a policy: the restarts of each replica."""
    try:
        return _integer(text, "per_replica")
    except ValueError:
        raise ValueError(f"restarts must begin with a number, as in 3, 3/1h or 3,oom=0, got {policy!r}.") from None


def _integer(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise ValueError(f"restarts: {name} must be a whole number, got {text!r}.")
    return int(text)
