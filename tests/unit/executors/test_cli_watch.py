"""Tests the rules that `replicas watch --set` accepts."""

from __future__ import annotations

import pytest
from typer import BadParameter

from executors.cli.watch import _settings
from executors.settings.policy import Restarts


@pytest.mark.parametrize(
    ("texts", "settings"),
    [
        ([], (None, None, None)),
        (["restarts=5"], (Restarts(per_replica=5), None, None)),
        (["restarts=3/1h,oom=0,hang=off"], (Restarts.parse("3/1h,oom=0"), "off", None)),
        (["hang=2m:3m,restarts=0"], (Restarts(per_replica=0), "2m:3m", None)),
        (["hang=off", "restarts=1"], (Restarts(per_replica=1), "off", None)),
        (["start=20m"], (None, None, "20m")),
        (["hang=2m,start=20m,restarts=1"], (Restarts(per_replica=1), "2m", "20m")),
    ],
)
def test_one_option_may_hold_several_rules(
    texts: list[str], settings: tuple[Restarts | None, str | None, str | None]
) -> None:
    assert _settings(texts) == settings


@pytest.mark.parametrize(
    "text", ["", "restart=3", "restarts=three", "hang=1,2", "start=soon", "start=auto:2", "restarts=1,runs=2", "3"]
)
def test_a_text_that_is_not_a_rule_is_refused(text: str) -> None:
    with pytest.raises(BadParameter):
        _settings([text])
