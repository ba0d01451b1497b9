"""Tests the rules of `--rule`: which are legal, and what the message about an illegal one says."""

from __future__ import annotations

import math

import pytest

from executors.settings import Settings
from executors.settings.watch_rules import MAX_RULES, WatchRule, parse_rules, watched_numbers

LEGAL = {
    "loss nan": "loss nan",
    "loss NaN": "loss nan",
    "loss nan for 3": "loss nan for 3",
    "loss > 8": "loss > 8",
    " loss  >=8->stop": "loss >= 8 -> stop",
    "loss < -3e-2": "loss < -0.03",
    "loss > 8 -> notify": "loss > 8",
    "gnorm > 10 * median": "gnorm > 10 * median",
    "gnorm>median*10 for 50 -> restart": "gnorm > 10 * median for 50 -> restart",
    "gnorm > median": "gnorm > median",
    "val/loss.ema <= .5": "val/loss.ema <= 0.5",
    "verlust_ä > 8": "verlust_ä > 8",
    "no round 10m": "no round 10m",
    "no output 30m -> restart": "no output 30m -> restart",
    "no progress 90": "no progress 90s",
    "log /CUDA error/": "log /CUDA error/",
    "log /a/b/ for 3": "log /a/b/ for 3",
    "log /x -> y/ -> stop": "log /x -> y/ -> stop",
    "log/x/": "log /x/",
    "gpu < 10% 15m": "gpu < 10% 15m",
    "gpu<2.5% 1h30m -> stop": "gpu < 2.5% 1h30m -> stop",
}
ILLEGAL = {
    "loss >> 8": ("'>>' is not a comparison", "loss > 8"),
    "loss = 8": ("'=' is not a comparison", "loss > 8"),
    "loss == nan": ("'==' is not a comparison", "loss nan"),
    "loss is nan": ("'is nan' is not a condition", "loss nan"),
    "isnan(loss)": ("'isnan(loss)' has no condition", "loss nan"),
    "loss > nan": ("'nan' is neither a number", "loss nan"),
    "loss > inf": ("'inf' is neither a number", "loss nan"),
    "loss 8": ("'8' is not a condition", "loss > 8"),
    "8 < loss": ("'8' is not the name", "loss > 8"),
    "loss > 8,5": ("'8,5' is neither a number", "loss > 8.5"),
    "loss > 8%": ("'8%' is neither a number", "loss > 8"),
    "loss > 8 → stop": ("'8 → stop' is neither a number", "loss > 8 -> stop"),
    "loss > 8 => stop": ("'8 => stop' is neither a number", "loss > 8 -> stop"),
    "loss > 8 - > stop": ("'8 - > stop' is neither", "loss > 8 -> stop"),
    "loss > 8 stop": ("'8 stop' is neither a number", "loss > 8 -> stop"),
    "loss > 8; restart": ("'8; restart' is neither", "loss > 8 -> restart"),
    "loss > 8 -> restrat": ("'restrat' is not an action; the actions are notify, stop, restart", "loss > 8 -> restart"),
    "loss > 8 -> kill": ("'kill' is not an action", "loss > 8 -> stop"),
    "loss > 8 -> STOP": ("'STOP' is not an action", "loss > 8 -> stop"),
    "loss > 8 ->": ("the action after '->' is missing", "loss > 8"),
    "'loss > 8'": ('"\'loss" is not the name', "loss > 8"),
    "“loss > 8”": ("'“loss' is not the name", "loss > 8"),
    "loss ≥ 8": ("'≥ 8' is not a condition", "loss >= 8"),
    "loss > −8": ("'−8' is neither a number", "loss > -8"),
    "loss above 8": ("'above 8' is not a condition", "loss > 8"),
    "gnorm > 10 × median": ("'10 × median' is neither", "gnorm > 10 * median"),
    "gnorm > 10median": ("'10median' is neither", "gnorm > 10 * median"),
    "loss > 8 for 50 steps": ("'for' needs a number of reports or lines", "loss > 8 for 50"),
    "no round 10 min": ("'10 min' is not a duration", "no round 10m"),
    "no round for 10 minutes": ("'for 10 minutes' is not a duration", "no round 10m"),
    "no rounds 10m": ("'rounds' cannot be missed", "no round 10m"),
    "no outptu 10m": ("'outptu' cannot be missed", "no output 10m"),
    "No Round 10M": ("'Round 10M' is not a condition", "no round 10m"),
    "no round 1h 30m": ("'1h 30m' is not a duration", "no round 1h30m"),
    "no round 10m for 3": ("'10m for 3' is not a duration", "no round 10m"),
    "log error": ("'log' needs a regular expression between two slashes", "log /error/"),
    "log 'error' -> stop": ("'log' needs a regular expression", "log /error/ -> stop"),
    "log /error/i": ("'i' comes after the expression", "log /(?i)error/"),
    "log /x/ 3": ("'3' comes after the expression", "log /x/ for 3"),
    "gpu < 10 15m": ("the utilization must be a percentage", "gpu < 10% 15m"),
    "gpu < 0.1 15m": ("the utilization must be a percentage", "gpu < 10% 15m"),
    "gpu 10% 15m": ("the comparison after 'gpu' is missing", "gpu < 10% 15m"),
    "gpu < 10% for 15 min": ("'for 15 min' is not a duration", "gpu < 10% 15m"),
    # No repair leads to a legal rule, so the message has examples of the same kind.
    "": ("it is empty", None),
    "loss": ("'loss' has no condition. In a shell, quotes keep > and < from redirecting", None),
    "-> stop": ("the condition before '->' is missing", None),
    "loss > eight": ("'eight' is neither a number", None),
    "loss > 8 for 5m": ("'for' needs a number of reports or lines from 1", None),
    "loss > 8 for 0": ("'for' needs a number of reports or lines from 1", None),
    "loss > 8 for -1": ("'for' needs a number of reports or lines from 1", None),
    "loss > 8 -> stop -> restart": ("'stop -> restart' is not an action", None),
    "1loss > 3": ("'1loss' is not the name", None),
    "median > 3": ("'median' is not the name", None),
    "no": ("the word after 'no' is missing", None),
    "no loss 10m": ("'loss' cannot be missed; a rule may name no round, no output, no progress", None),
    "no round": ("the duration is missing", None),
    "no round -10m": ("'-10m' is not a duration", None),
    "no round 0": ("the duration must be from 1 s", None),
    "no round 1e99": ("'1e99' is not a duration", None),
    "log //": ("the regular expression between the slashes is empty", None),
    "log /[[:alpha:]]+ failed/": ("is ambiguous, so write \\[ for a bracket: possible nested set at position", None),
    "log /(/": ("the regular expression is wrong: missing ), unterminated subpattern at position 0", None),
    "gpu < 10%": ("the duration is missing", None),
    "gpu < 110% 15m": ("the utilization must be a percentage", None),
    "gpu < 10% 15s": ("the duration must be from 60 s", None),
    "loss > 8\nno round 10m": ("it has a line break", None),
    "x" * 500: ("it has more than 400 characters", None),
}


@pytest.mark.parametrize("text", LEGAL)
def test_a_legal_rule_has_one_canonical_text_that_means_the_same(text: str) -> None:
    rule = WatchRule.parse(text)
    assert str(rule) == LEGAL[text]
    assert WatchRule.parse(str(rule)) == rule


@pytest.mark.parametrize("text", ILLEGAL, ids=[repr(text)[:40] for text in ILLEGAL])
def test_an_illegal_rule_is_refused_with_its_wrong_part_and_the_nearest_legal_rule(text: str) -> None:
    wrong, near = ILLEGAL[text]
    with pytest.raises(ValueError) as caught:
        WatchRule.parse(text)
    message = str(caught.value)
    assert message.startswith(f"Rule {text[:400]!r}"[:300])
    assert wrong in message
    if near is None:
        assert "Legal are 'no round 10m'" in message or "Legal are" in message
    else:
        assert message.endswith(f"Did you mean {near!r}?")
        assert str(WatchRule.parse(near)) == near


def test_nan_means_each_number_that_is_not_finite_and_a_comparison_is_false_for_nan() -> None:
    rule = WatchRule.parse("loss nan")
    assert [rule.fits(value, math.nan) for value in (math.nan, math.inf, -math.inf, 8.0)] == [True, True, True, False]
    rule = WatchRule.parse("loss > 8")
    assert [rule.fits(value, math.nan) for value in (math.nan, math.inf, 8.0, 8.5)] == [False, True, False, True]
    rule = WatchRule.parse("gnorm > 10 * median")
    assert [rule.fits(50.0, median) for median in (math.nan, 4.0, 5.0)] == [False, True, False]


def test_settings_record_the_canonical_texts_and_refuse_what_no_launch_could_obey() -> None:
    settings = Settings.of(n=1, rules=["loss  >8", "no round 10m"])
    assert settings.to_json()["rules"] == ("loss > 8", "no round 10m")
    assert Settings.parse({"n": 1, "rules": ["loss > 8"]}, "settings").rules == ("loss > 8",)
    assert watched_numbers(parse_rules(["loss nan", "loss > 8", "gnorm > 1", "no round 10m"])) == ("loss", "gnorm")
    assert Settings.of(n=1, rules=["none"]).rules == ()
    for rules, words in (
        (["none", "loss > 8"], "must be the only one"),
        (["loss > 8", "loss >8"], "'loss > 8' is given twice"),
        ([f"loss > {each}" for each in range(MAX_RULES + 1)], "at most 32 rules, got 33"),
        (
            ["loss > 8 -> restart"],
            "needs restarts (--restarts), as in --restarts 3. Without it, write 'loss > 8 -> stop'",
        ),
    ):
        with pytest.raises(ValueError, match=r"Rule|at most") as caught:
            Settings.of(n=1, rules=rules)
        assert words in str(caught.value)
    for policy in ("0", "3,rule=0", "preempted", "none"):
        with pytest.raises(ValueError, match=r"needs restarts|can restart nothing"):
            Settings.of(n=1, rules=["loss > 8 -> restart"], restarts=policy)
    for policy in ("3", "3,rule=1", "0,rule=inf"):
        assert Settings.of(n=1, rules=["loss > 8 -> restart"], restarts=policy).rules
    for wrong in ("loss > 8", [8]):
        with pytest.raises(TypeError):
            Settings.of(n=1, rules=wrong)
    with pytest.raises(Exception, match="'rules' is"):
        Settings.parse({"n": 1, "rules": ["loss >> 8"]}, "settings")
