"""Each dependency has a lower bound, and the versions that the tests use are not below it."""

from __future__ import annotations

from lowest import ROOT, SELECTION, lower_bounds, tool_requirements
from packaging.utils import canonicalize_name
from packaging.version import Version


def test_each_dependency_has_a_lower_bound_that_the_pinned_version_satisfies() -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    parts = (line.partition("==") for line in lines)
    pinned: dict[str, str] = {canonicalize_name(name): version for name, _, version in parts}
    below = {name: bound for name, bound in lower_bounds().items() if Version(pinned[name]) < Version(bound)}
    assert below == {}


def test_the_selection_of_the_lowest_versions_exists() -> None:
    assert [path for path in SELECTION if not (ROOT / path).exists()] == []


def test_each_package_of_the_tests_has_a_version() -> None:
    assert [text for text in tool_requirements() if "==" not in text and ">=" not in text] == []
