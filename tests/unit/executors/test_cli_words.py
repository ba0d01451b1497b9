"""The words of the command: each short option has one meaning, each thing one name, and near misses are helped."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from executors.cli import SYNONYMS, command_of, main

VERBS: dict[str, Any] = command_of().commands
SHORT = {
    "-a": {"--arg"},
    "-m": {"--module"},
    "-b": {"--backend"},
    "-d": {"--detach"},
    "-e": {"--env"},
    "-f": {"--follow"},
    "-n": {"--lines", "--last"},  # how many lines to show
    "-o": {"--out"},
    "-r": {"--rank"},
    "-v": {"--verbose"},
}


def called(*arguments: str, patch: pytest.MonkeyPatch) -> int:
    patch.setattr(sys, "argv", ["replicas", *arguments])
    patch.setattr(sys, "path", [*sys.path])
    return main()


def test_a_short_option_means_the_same_in_every_verb() -> None:
    found: dict[str, set[str]] = {}
    for verb in VERBS.values():
        for option in verb.params:
            for short in (name for name in option.opts if not name.startswith("--") and name.startswith("-")):
                found.setdefault(short, set()).update(name for name in option.opts if name.startswith("--"))
    assert found == SHORT


def test_help_calls_a_rendezvous_so_and_shows_no_type_of_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for verb in ("", *VERBS):
        assert called(*verb.split(), "--help", patch=monkeypatch) == 0
        text = capsys.readouterr().out
        assert "<bool>" not in text, verb
        assert " store " not in text.replace("store:", ""), verb


@pytest.mark.parametrize("name", ["run", "ps", "kill", "tail"])
def test_the_verbs_of_other_tools_name_ours(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(name, "brave-otter", patch=monkeypatch) == 2
    assert f"No such command {name!r}. Did you mean {SYNONYMS[name]!r}?" in capsys.readouterr().err
    assert not set(SYNONYMS) & set(VERBS)
    assert set(SYNONYMS.values()) <= set(VERBS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launch", "-n", "4"), "No such option: -n. How many replicas is --n; -n is how many lines."),
        (("launch", "-o", "a=1"), "No such option: -o. An option of the backend is --option; -o is the folder of "),
        (("launh",), "No such command 'launh'. Did you mean 'launch'"),
    ],
)
def test_an_option_or_verb_that_does_not_exist_is_explained(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(*arguments, patch=monkeypatch) == 2
    assert message in capsys.readouterr().err
