"""The two tiers of tests: each test that only `make test-all` runs exists, and none of them is a contract."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NIGHT = (TESTS / "night.txt").read_text(encoding="utf-8").splitlines()
DAY = (TESTS / "day.txt").read_text(encoding="utf-8").splitlines()


def names_in(file: Path) -> set[str]:
    """Return the tests that a file defines, methods with their class."""
    found = set[str]()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("file", sorted({line.partition("::")[0] for line in NIGHT}))
def test_each_test_that_runs_at_night_exists(file: str) -> None:
    names = {line.partition("::")[2].partition("[")[0] for line in NIGHT if line.partition("::")[0] == file}
    assert names <= names_in(TESTS / file), (
        "tests/night.txt names a test that does not exist: correct or remove the line"
    )


@pytest.mark.parametrize("lines", [NIGHT, DAY], ids=["night", "day"])
def test_a_list_is_sorted_and_names_each_test_once(lines: list[str]) -> None:
    assert sorted(set(lines)) == lines


def test_each_line_of_the_day_keeps_a_parameter_of_a_test_of_the_night() -> None:
    assert [line for line in DAY if "[" not in line or line.partition("[")[0] not in NIGHT] == []


def test_each_parameter_that_a_list_names_exists(request: pytest.FixtureRequest) -> None:
    """`make test` selects the tests of the day, and `make test-all` all of them. A part of the tests shows a part."""
    selected = {item.nodeid.removeprefix("tests/") for item in request.session.items}
    without = {each.partition("[")[0] for each in selected}
    known = [line for line in (*DAY, *NIGHT) if "[" in line and line.partition("[")[0] in without]
    of_the_night = [] if any(item.get_closest_marker("slow") for item in request.session.items) else NIGHT
    assert [line for line in known if line not in selected and line not in of_the_night] == []


def test_no_contract_is_left_to_the_night() -> None:
    assert [line for line in NIGHT if line.startswith("contract/")] == []
