"""Tests the names of options and verbs: one meaning for each short option, one name for each thing, and help for typing
errors.
"""

from __future__ import annotations

import re
import shlex
import sys
from typing import Any

import pytest

from executors.cli import FIRST_STEPS, SYNONYMS, command_of, main
from executors.cli.verb_help import EXIT_CODES, wrap_command
from executors.settings.declaration import PANELS
from executors.settings.settings import OPTIONS

VERBS: dict[str, Any] = command_of().commands
SHORT = {
    "-a": {"--arg"},
    "-m": {"--module"},
    "-b": {"--backend"},
    "-d": {"--detach"},
    "-e": {"--env"},
    "-f": {"--follow"},
    "-n": {"--lines", "--last"},  # the number of lines to show
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


def test_no_help_calls_a_rendezvous_a_store_or_shows_the_type_of_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for verb in ("", *VERBS):
        assert called(*verb.split(), "--help", patch=monkeypatch) == 0
        text = capsys.readouterr().out
        assert "<bool>" not in text, verb
        assert " store " not in text.replace("store:", ""), verb


def panels_of(text: str) -> dict[str, list[str]]:
    """Return the flags, or the verbs, in each panel of a help."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if title := re.match(r"╭─ (.+?) ─", line):
            found[title[1]] = []
        elif entry := re.match(r"│ (?:\* +)?(--[\w-]+|[a-z]+)[ ,]", line):
            list(found.values())[-1].append(entry[1])
    return found


def help_of(*arguments: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int = 120) -> str:
    patch.setenv("COLUMNS", str(width))
    assert called(*arguments, "--help", patch=patch) == 0
    return capsys.readouterr().out


def test_the_help_of_launch_has_panels_and_begins_with_the_six_options_of_a_first_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    panels = panels_of(help_of("launch", patch=monkeypatch, capsys=capsys))
    assert [*panels] == ["Arguments", *PANELS]
    assert panels["Run"][:6] == ["--n", "--backend", "--rendezvous", "--gpu", "--arg", "--run-id"]
    n_options = sum(option.param_type_name == "option" for option in VERBS["launch"].params)
    assert sum(map(len, panels.values())) == n_options + 1, "the panels have each option once, and --help"
    assert {option.panel for option in OPTIONS.values()} <= {*PANELS}


def test_the_help_of_the_command_groups_the_verbs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    panels = panels_of(help_of(patch=monkeypatch, capsys=capsys))
    del panels["Options"]
    assert [*panels] == ["Start", "Look", "Results", "End and clean", "Settings and checks"]
    assert panels["Start"] == ["launch", "resume", "add"]
    assert {verb for verbs in panels.values() for verb in verbs} == {*VERBS}


def test_the_exit_codes_are_a_list_at_the_end_of_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of("launch", patch=monkeypatch, capsys=capsys)
    _, _, end = text.partition("Exit codes\n")
    assert re.findall(r"(?m)^ +(\d+)  \S", end) == [str(code) for code in EXIT_CODES]
    assert "╭" not in end


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("verb", ["", *VERBS])
def test_each_help_fits_the_terminal(
    verb: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = help_of(*verb.split(), patch=monkeypatch, capsys=capsys, width=width).splitlines()
    assert max(map(len, lines)) <= width
    texts = [cells[-1].strip() for line in lines if line.startswith("│") and (cells := line.strip("│ ").split("  "))]
    assert texts, "a help has a panel"


EXAMPLES = [*FIRST_STEPS, *(example for verb in VERBS.values() for example in verb.callback.examples)]


def test_each_verb_has_examples() -> None:
    assert {verb for verb, command in VERBS.items() if not command.callback.examples} == set()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_help_are_command_lines_that_parse(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, name, *arguments = shlex.split(example)
    assert program == "replicas"
    before, _, _ = " ".join(arguments).partition(" -- ")
    given = shlex.split(before) if "'" not in before else arguments
    command = command_of([name]).commands[name]
    context = command.make_context(name, given, resilient_parsing=True)
    assert context.params
    parser = command.make_parser(context)
    parser.parse_args(args=list(given))  # an unknown option would raise an error


def test_a_long_example_is_one_command_for_a_shell() -> None:
    command = "replicas launch train.py:main --n 4 --arg steps=500 -- --lr 1e-3"
    lines = wrap_command(command, 38)
    assert lines == ["replicas launch train.py:main --n 4 \\", "  --arg steps=500 -- --lr 1e-3"]
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)
    assert wrap_command(command, 100) == [command]


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
        (("launch", "-n", "4"), "No such option: -n. The number of replicas is --n; -n is a number of lines."),
        (("launch", "-o", "a=1"), "No such option: -o. An option of the backend is --option; -o is the folder of "),
        (("launh",), "No such command 'launh'. Did you mean 'launch'"),
        (("status", "x", "--jsn"), "Error: No such option: --jsn. Did you mean '--json'?\n"),
        (("launch", "t.py", "--lr", "3"), "Arguments of t.py go after --: replicas launch t.py --n 4 -- --lr …\n"),
        (
            ("launch", "t.py", "5"),
            "Unexpected argument '5'. Arguments of t.py go after --: replicas launch t.py --n 4 ",
        ),
        (
            ("launch", "t.py:f", "--max-lr", "3"),
            "No such option: --max-lr. An argument of the function is --arg max_lr=…\n",
        ),
        (("status", "x", "y"), "Error: Unexpected argument 'y'.\n"),
        (("status",), "Error: Missing RUN: the id of a run, as `replicas ls` lists it, or URL/RUN_ID for a run in "),
        (("model", "x"), "Error: Missing --out: the file to write, in the safetensors format.\n"),
        (("add", "x"), "Error: Missing --n: the number of replicas to add.\n"),
        (("launch", "t.py", "--n", "two"), "Error: --n must be a whole number, got 'two'.\n"),
        (("ls", "--last", "x"), "Error: --last must be a whole number, got 'x'.\n"),
        (("launch", "--max-cost", "x"), "Error: --max-cost must be a number, got 'x'.\n"),
        (("resume", "x", "--total-steps", "0"), "Error: --total-steps must be at least 1, got 0.\n"),
        (("wait", "x", "--timeout"), "Error: --timeout needs a value.\n"),
        (("launch",), "Error: Missing --n, the number of replicas. Try: replicas launch train.py:main --n 4\n"),
    ],
)
def test_an_option_or_verb_that_does_not_exist_is_explained(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(*arguments, patch=monkeypatch) == 2
    assert message in capsys.readouterr().err
