"""The two tiers of tests: what `make test` leaves to `make test-all` exists, and no contract is among it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NIGHT = (TESTS / "night.txt").read_text(encoding="utf-8").split()


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
    names = {line.partition("::")[2] for line in NIGHT if line.partition("::")[0] == file}
    assert names <= names_in(TESTS / file), "rename or remove its line in tests/night.txt"


def test_the_list_of_the_night_is_sorted_and_names_each_test_once() -> None:
    assert sorted(set(NIGHT)) == NIGHT


def test_no_contract_is_left_to_the_night() -> None:
    assert [line for line in NIGHT if line.startswith("contract/")] == []
