"""Names the kinds of events that a notification can be about: the values of `--notify-on`."""

from __future__ import annotations

from collections.abc import Mapping

from executors.errors import unknown_name

KINDS: Mapping[str, str] = {
    "end": "the run ended",
    "given_up": "a rank was given up, or the run was stopped by a rule of restarts",
    "hang": "a hang was ended",
    "rule": "a rule was broken (`--rule`), or cannot be judged",
    "no_round": "no round has come for five times the usual time",
    "budget": "80 % of a restart budget, of `within` or of `max_cost` is used",
}
"""The kinds of notices, the most urgent first, each with its meaning."""
ON_HELP = f"The events that --notify sends, separated by commas: {', '.join(KINDS)}."


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds of notices that a text such as `end,given_up` names.

    Args:
        text: the kinds, separated by commas.

    Raises:
        ValueError: the text names no kind, or one that does not exist. The message has the nearest valid name.

    Example:
        parse_kinds("end,hang")  # ("end", "hang")
    """
    names = [part.strip().replace("-", "_") for part in text.split(",")]
    for name in names:
        if name not in KINDS:
            raise ValueError("notify_on: " + unknown_name("event", name, KINDS))
    return tuple(dict.fromkeys(names))


def kinds_text(text: str) -> str:
    """Return the kinds of notices as a record has them: `end,given_up`.

    Args:
        text: the kinds, as for `parse_kinds`.

    Raises:
        ValueError: the text names no kind, or one that does not exist.

    Example:
        kinds_text("end, given-up")  # "end,given_up"
    """
    return ",".join(parse_kinds(text))
