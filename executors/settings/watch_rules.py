"""Parses and checks the rules of `--rule`, such as `loss > 8 for 50 -> stop`: conditions that a supervisor judges."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from executors.errors import did_you_mean
from executors.settings.durations import DURATIONS, parse_duration

NOTIFY, STOP, RESTART = ACTIONS = ("notify", "stop", "restart")
NUMBER, SILENCE, LOG, GPU = "number", "silence", "log", "gpu"
"""The kinds of rules: about a reported number, about something that does not come, about a line, about the GPU."""
SILENT = ("round", "output", "progress")
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": lambda value, limit: value > limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
    "<=": lambda value, limit: value <= limit,
}
NO_RULES = "none"
"""The value that stands for no rules, as in `--rule none`."""
MAX_RULES, MAX_RULE = 32, 400
MAX_NAME_BYTES = 60
MAX_COUNT = 1_000_000
LEAST_S, MAX_S = 1.0, 1e7
LEAST_GPU_S = 60.0  # the utilization is measured every 30 s
EXAMPLES = {
    SILENCE: "'no round 10m', 'no output 30m' or 'no progress 5m'",
    LOG: "'log /CUDA error/' or 'log /timed? out/ for 3'",
    GPU: "'gpu < 10% 15m'",
    NUMBER: "'loss nan', 'loss > 8' or 'gnorm > 10 * median for 50 -> stop'",
}
"""Legal rules of each kind, for the messages about illegal ones."""
_NAME = re.compile(r"[^\W\d][\w./-]*")
_COMPARED = re.compile(r"([^\s<>=!]+)\s*([<>=!]+)\s*(.*)", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_LOG = re.compile(r"log\s*/(.*)/(.*)", re.DOTALL)
_COUNTED = re.compile(r"(.*?)\s+for\s+(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class WatchRule:
    """One rule: a condition, and what follows if the condition holds.

    Example:
        WatchRule.parse("loss > 8 for 50 -> stop").count  # 50
    """

    kind: str
    """`number`, `silence`, `log` or `gpu`."""
    name: str = ""
    """The name of the reported number, or the word after `no`."""
    comparison: str = ""
    """A key of `COMPARISONS`, or "nan"."""
    limit: float = math.nan
    """The number to compare with. With `of_median` it is a factor. For `gpu` it is a share from 0 to 1."""
    of_median: bool = False
    """True if `limit` is a factor of the median of the rank's last reports of the number."""
    pattern: str = ""
    """The regular expression of a `log` rule."""
    span: str = ""
    """The duration of the rule as the user wrote it, as in "10m"."""
    count: int = 1
    """The number of consecutive reports, or of lines, that must fit."""
    action: str = NOTIFY
    """`notify`, `stop` or `restart`."""

    @classmethod
    def parse(cls, text: str) -> WatchRule:
        """Parse a rule.

        Args:
            text: the rule, as in `gnorm > 10 * median for 50 -> restart`.

        Raises:
            TypeError: the value is not a text.
            ValueError: the text is not a rule. The message names the wrong part, and the nearest legal rule.

        Example:
            str(WatchRule.parse("loss  >8->stop"))  # "loss > 8 -> stop"
        """
        if not isinstance(text, str):
            raise TypeError(f"A rule must be a text, as in 'loss > 8 -> stop', got {text!r}.")
        try:
            return _parse(text.strip())
        except ValueError as error:
            shown = text if len(text) <= MAX_RULE else f"{text[:MAX_RULE]}…"
            near = _nearest(text)
            remedy = f"Legal are {_examples_for(text)}." if near is None else f"Did you mean {near!r}?"
            raise ValueError(f"Rule {shown!r}: {error}. {remedy}") from None

    @property
    def for_s(self) -> float:
        """The duration in seconds. 0: the rule has none."""
        return parse_duration(self.span) if self.span else 0.0

    @property
    def condition(self) -> str:
        """The rule without its action: `loss > 8 for 50`."""
        counted = f" for {self.count}" if self.count > 1 else ""
        if self.kind == SILENCE:
            return f"no {self.name} {self.span}"
        if self.kind == LOG:
            return f"log /{self.pattern}/{counted}"
        if self.kind == GPU:
            return f"gpu {self.comparison} {100 * self.limit:.12g}% {self.span}"
        if self.comparison == "nan":
            return f"{self.name} nan{counted}"
        limit = f"{self.limit:.12g}"
        if self.of_median:
            limit = "median" if self.limit == 1 else f"{limit} * median"
        return f"{self.name} {self.comparison} {limit}{counted}"

    def __str__(self) -> str:
        return self.condition + ("" if self.action == NOTIFY else f" -> {self.action}")

    def fits(self, value: float, median: float) -> bool:
        """Return True if a reported number fits the condition.

        `nan` fits each number that is not finite, because an infinite loss is the same failure one step earlier.

        Args:
            value: the reported number.
            median: the median of the rank's last reports. nan: it is not known yet.

        Example:
            WatchRule.parse("loss > 8").fits(9.0, math.nan)  # True
        """
        if self.comparison == "nan":
            return not math.isfinite(value)
        limit = self.limit * median if self.of_median else self.limit
        return COMPARISONS[self.comparison](value, limit)  # a comparison with nan is False


def rule_text(text: str) -> str:
    """Return a rule as records contain it.

    Args:
        text: the rule.

    Raises:
        ValueError: the text is not a rule.

    Example:
        rule_text("loss >8")  # "loss > 8"
    """
    return str(WatchRule.parse(text))


def rule_texts(rules: Iterable[str]) -> tuple[str, ...]:
    """Return the rules that a user gave, as records contain them.

    Args:
        rules: the rules. The only value `none` stands for no rules.

    Raises:
        TypeError: a value is not a text.
        ValueError: a text is not a rule, or a rule is given twice, or there are too many.

    Example:
        rule_texts(["loss >8", "no round 10m"])  # ("loss > 8", "no round 10m")
    """
    given = list(rules)
    if given == [NO_RULES]:
        return ()
    if NO_RULES in given:
        raise ValueError("Rule 'none' stands for no rules, so it must be the only one. Remove it, or the others.")
    texts = [rule_text(each) for each in given]
    for text in texts:
        if texts.count(text) > 1:
            raise ValueError(f"Rule {text!r} is given twice. Remove one of them.")
    if len(texts) > MAX_RULES:
        raise ValueError(f"A run has at most {MAX_RULES} rules, got {len(texts)}.")
    return tuple(texts)


def parse_rules(texts: Iterable[str]) -> tuple[WatchRule, ...]:
    """Return the rules of recorded settings.

    Args:
        texts: the setting `rules`.

    Example:
        parse_rules(spec.settings.rules)
    """
    return tuple(map(WatchRule.parse, texts))


def watched_numbers(rules: Sequence[WatchRule]) -> tuple[str, ...]:
    """Return the names of the reported numbers that rules are about, each once.

    Args:
        rules: the rules.

    Example:
        watched_numbers(parse_rules(["loss nan", "loss > 8", "no round 10m"]))  # ("loss",)
    """
    return tuple(dict.fromkeys(rule.name for rule in rules if rule.kind == NUMBER))


def _examples_for(text: str) -> str:
    """Return legal rules of the kind that an illegal text begins like."""
    kinds = {"no": SILENCE, "log": LOG, "gpu": GPU}
    word = re.match(r"[a-z]*", text.strip().lower())
    return EXAMPLES[kinds.get(word[0] if word else "", NUMBER)]


def _parse(text: str) -> WatchRule:
    if not text:
        raise ValueError("it is empty")
    if len(text) > MAX_RULE:
        raise ValueError(f"it has more than {MAX_RULE} characters")
    if "\n" in text or not text.replace("\t", " ").isprintable():
        raise ValueError("it has a line break or another character that cannot be printed")
    if text.startswith("log") and (found := _LOG.fullmatch(text)):
        what, arrow, action = found[2].partition("->")
        rule = _log_rule(found[1])
        if what.strip() and not re.match(r"\s+for\b", what):
            raise ValueError(f"{what.strip()!r} comes after the expression, where only 'for N' and an action may come")
        rule = replace(rule, count=_count(what.strip().removeprefix("for").strip())) if what.strip() else rule
    else:
        what, arrow, action = text.partition("->")
        rule = _condition(what.strip())
    if not arrow:
        return rule
    if action.strip() not in ACTIONS:
        given = action.strip()
        said = f"{given!r} is not an action" if given else "the action after '->' is missing"
        raise ValueError(f"{said}; the actions are {', '.join(ACTIONS)}")
    return replace(rule, action=action.strip())


def _condition(what: str) -> WatchRule:
    first, _, rest = what.partition(" ")
    if not what:
        raise ValueError("the condition before '->' is missing")
    if first == "log" or what.startswith("log/"):
        raise ValueError("'log' needs a regular expression between two slashes")
    if first == "no":
        return _silence(rest.strip())
    if first == "gpu" or re.match(r"gpu\s*[<>=]", what):
        return _gpu(what)
    counted = _COUNTED.fullmatch(what)
    count = 1
    if counted:
        what, count = counted[1], _count(counted[2])
    return replace(_number_rule(what), count=count)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or not 1 <= int(text) <= MAX_COUNT:
        raise ValueError(f"'for' needs a number of reports or lines from 1 to {MAX_COUNT:,}, got {text!r}")
    return int(text)


def _number_rule(what: str) -> WatchRule:
    name, _, rest = what.partition(" ")
    if re.fullmatch(r"nan", rest.strip(), re.IGNORECASE):
        return WatchRule(kind=NUMBER, name=_name(name), comparison="nan")
    found = _COMPARED.fullmatch(what)
    if found is None:
        raise ValueError(
            f"{what!r} has no condition. In a shell, quotes keep > and < from redirecting the output"
            if not rest
            else f"{rest.strip()!r} is not a condition"
        )
    name, comparison, limit = found[1], found[2], found[3].strip()
    name = _name(name)
    if comparison not in COMPARISONS:
        raise ValueError(f"{comparison!r} is not a comparison; the comparisons are {', '.join(COMPARISONS)}")
    if not limit:
        raise ValueError(f"the number after {comparison!r} is missing")
    factors = [factor.strip() for factor in limit.split("*")]
    of_median = "median" in factors
    if of_median:
        factors.remove("median")
    value = _value(factors[0]) if len(factors) == 1 else 1.0 if of_median and not factors else None
    if value is None:
        raise ValueError(f"{limit!r} is neither a number nor 'N * median'")
    return WatchRule(kind=NUMBER, name=name, comparison=comparison, limit=value, of_median=of_median)


def _name(name: str) -> str:
    if not _NAME.fullmatch(name) or name in ("median", "nan", "for") or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"{name!r} is not the name of a reported number, such as loss or gnorm")
    return name


def _value(text: str) -> float | None:
    """Return a finite number. None: the text is something else."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else None


def _silence(rest: str) -> WatchRule:
    name, _, span = rest.partition(" ")
    if name not in SILENT:
        said = f"{name!r} cannot be missed" if name else "the word after 'no' is missing"
        raise ValueError(f"{said}; a rule may name {', '.join(f'no {each}' for each in SILENT)}")
    return WatchRule(kind=SILENCE, name=name, span=_span(span.strip(), LEAST_S))


def _span(text: str, least_s: float) -> str:
    if not text:
        raise ValueError(f"the duration is missing, as in {DURATIONS}")
    try:
        seconds = parse_duration(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a duration, as in {DURATIONS}") from None
    if not least_s <= seconds <= MAX_S:
        raise ValueError(f"the duration must be from {least_s:g} s to {MAX_S / 86400:.0f} days, got {text!r}")
    return text if re.search(r"[hms]$", text) else f"{text}s"


def _gpu(what: str) -> WatchRule:
    found = re.fullmatch(r"gpu\s*([<>=!]*)\s*(\S*)\s*(.*)", what, re.DOTALL)
    assert found is not None
    comparison, share, span = found.groups()
    if comparison not in COMPARISONS:
        said = f"{comparison!r} is not a comparison" if comparison else "the comparison after 'gpu' is missing"
        raise ValueError(f"{said}; the comparisons are {', '.join(COMPARISONS)}")
    value = _value(share.removesuffix("%"))
    if not share.endswith("%") or value is None or not 0 <= value <= 100:
        raise ValueError(f"the utilization must be a percentage from 0% to 100%, got {share!r}")
    return WatchRule(kind=GPU, comparison=comparison, limit=value / 100, span=_span(span.strip(), LEAST_GPU_S))


def _log_rule(pattern: str) -> WatchRule:
    if not pattern:
        raise ValueError("the regular expression between the slashes is empty, so it would fit each line")
    try:
        with warnings.catch_warnings():
            # Python warns about expressions that do not mean what they look like, such as [[:alpha:]].
            warnings.simplefilter("error")
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the regular expression is wrong: {error}") from None
    except Warning as warning:
        words = str(warning).partition("\n")[0]
        raise ValueError(f"the regular expression is ambiguous, so write \\[ for a bracket: {words.lower()}") from None
    return WatchRule(kind=LOG, pattern=pattern)


# The nearest legal rule. Each step repairs one usual mistake, and the result is only offered if it can be parsed.

_SIGNS = {
    **dict.fromkeys("→⇒➔➜⟶⇨↦", "->"), "≥": ">=", "≤": "<=", "×": "*", "·": "*", "−": "-", "＞": ">", "＜": "<",
    **dict.fromkeys("–—", "-"), **dict.fromkeys("\u00a0\u202f\u2009\t\r\n", " "), **dict.fromkeys("“”„‘’‚«»`", ""),
}  # fmt: skip
_UNITS = r"(h|m|s)(?:ours?|rs?|in(?:ute)?s?|ec(?:ond)?s?)?"
_LIKE_ACTIONS = {
    **dict.fromkeys(("kill", "end", "cancel", "abort", "halt", "exit", "quit", "terminate", "fail"), STOP),
    **dict.fromkeys(("retry", "relaunch", "reboot", "resume", "reset"), RESTART),
    **dict.fromkeys(("alert", "warn", "warning", "mail", "email", "message", "report", "tell", "notification"), NOTIFY),
}


def _nearest(text: str) -> str | None:
    """Return the legal rule that a text probably means. None: no repair leads to a legal rule."""
    if len(text) > MAX_RULE:
        return None
    fixed = "".join(_SIGNS.get(char, char) for char in text).strip().strip("'\"").strip()
    body, arrow, action = _split_action(fixed)
    is_log = re.match(r"log\b", body, re.IGNORECASE) is not None
    for repaired in dict.fromkeys((body, _repaired_log(body) if is_log else _repaired(body))):
        try:
            return str(_parse(f"{repaired} -> {_like_action(action)}" if arrow else repaired))
        except ValueError:
            continue
    return None


def _split_action(text: str) -> tuple[str, bool, str]:
    """Split a text at the last sign that looks like an arrow and that a word follows."""
    found = re.fullmatch(r"(.*?)\s*(?:-+\s*>+|=+>|:|,|;|\bthen\b|-)\s*([A-Za-z]\w*)", text, re.DOTALL)
    if found and (like := _like_action(found[2])) in ACTIONS and (like != found[2] or found[1]):
        return found[1], True, like
    what, arrow, action = text.rpartition("->")
    if arrow:
        return what.strip(), True, action.strip() or NOTIFY
    words = text.rsplit(None, 1)
    if len(words) == 2 and words[1].lower() in ACTIONS:
        return words[0], True, words[1].lower()
    return text, False, ""


def _like_action(word: str) -> str:
    word = word.lower()
    if word in ACTIONS:
        return word
    near = did_you_mean(word, ACTIONS)
    return _LIKE_ACTIONS.get(word) or next((each for each in ACTIONS if repr(each) in near), word)


def _repaired_log(body: str) -> str:
    rest = re.sub(r"^log\s*[:=~]*\s*", "", body, flags=re.IGNORECASE)
    rest = re.sub(r"(/[a-z]*)\s+for\s+\D*$", r"\1", rest)
    counted = re.fullmatch(r"(.*?)\s+(?:for\s+)?[x]?(\d+)\s*(?:times|lines|x)?", rest, re.DOTALL)
    pattern, count = (counted[1], f" for {counted[2]}") if counted else (rest, "")
    flags = re.fullmatch(r"/(.*)/([a-z]+)", pattern, re.DOTALL)
    if flags:
        pattern = f"(?{flags[2]}){flags[1]}" if set(flags[2]) <= set("aimsx") else flags[1]
    return f"log /{pattern.strip().strip(chr(34) + chr(39)).strip('/')}/{count}"


def _repaired(body: str) -> str:
    text = re.sub(r"\s+", " ", body)
    text = re.sub(r"([<>])\1+", r"\1", text)
    text = text.replace("=<", "<=").replace("=>", ">=")
    text = re.sub(r"\bis ?nan\(?\s*([\w./]+)\s*\)?", r"\1 nan", text, flags=re.IGNORECASE)
    text = re.sub(
        r"^([\w./-]+) ?(?:[<>=!]+|is|:)? ?(?:nan|inf|infinite|not finite)\b", r"\1 nan", text, flags=re.IGNORECASE
    )
    text = re.sub(r"(?<=\d),(?=\d)", ".", text)
    text = (
        re.sub(rf"(\d) ?{_UNITS}\b", lambda m: m[1] + m[2].lower(), text, flags=re.IGNORECASE)
        if re.match(r"(?:no|gpu)\b", text, re.IGNORECASE)
        else text
    )
    text = re.sub(r"^(no)\b", "no", text, flags=re.IGNORECASE)
    text = re.sub(r"^no (round|output|progress)s?\b", lambda m: f"no {m[1].lower()}", text, flags=re.IGNORECASE)
    if word := re.match(r"no (\w+)", text):
        near = did_you_mean(word[1].lower(), SILENT)
        text = next((f"no {each}{text[word.end() :]}" for each in SILENT if repr(each) in near), text)
    text = re.sub(r"^(no \w+) (?:for|in|since|within|>) ?", r"\1 ", text)
    if text.startswith("no "):
        text = re.sub(r"(?<=[hm])\s+(?=\d+[ms])", "", re.sub(r" for \d+$", "", text))
    text = re.sub(r"^gpu ?", "gpu ", text, flags=re.IGNORECASE)
    text = re.sub(r"^(gpu) ([<>]=?)? ?([\d.]+) ?(?:%|percent)? (?:for |in )?(?=[\d.]+[hms])", _gpu_share, text)
    text = re.sub(r"\bfor (\d+) ?(?:steps?|reports?|times|lines|x)\b", r"for \1", text, flags=re.IGNORECASE)
    text = re.sub(r" (?:x ?(\d+)|(\d+) ?(?:times|x))$", lambda m: f" for {m[1] or m[2]}", text)
    text = re.sub(r"([\d.]+) ?x? ?median\b", r"\1 * median", text, flags=re.IGNORECASE)
    text = re.sub(r"\bmedian ?x? ?([\d.]+)", r"\1 * median", text, flags=re.IGNORECASE)
    if swapped := re.fullmatch(r"([-+\d.eE]+) ?([<>]=?) ?([^\W\d][\w./-]*)(.*)", text):
        text = f"{swapped[3]} {swapped[2].translate({60: 62, 62: 60})} {swapped[1]}{swapped[4]}"
    text = re.sub(r"^([\w./-]+) (?:above|over|exceeds|gt|greater than|more than) ", r"\1 > ", text, flags=re.IGNORECASE)
    text = re.sub(r"^([\w./-]+) (?:below|under|lt|less than) ", r"\1 < ", text, flags=re.IGNORECASE)
    text = re.sub(r"^(?!no |gpu )([^\W\d][\w./-]*) ?(?: |==?|!=|:) ?(?=[-+\d.])", r"\1 > ", text)
    return re.sub(r"^([\w./-]+ ?[<>]=? ?[-+\d.eE]+)%", r"\1", text) if not text.startswith("gpu") else text


def _gpu_share(found: re.Match[str]) -> str:
    share = float(found[3])
    return f"gpu {found[2] or '<'} {share if share > 1 else 100 * share:.12g}% "
