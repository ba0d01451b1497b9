"""The pages for contributors. Each decision record is complete and in the index, and no reference leads nowhere."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import language
import pytest

ROOT = Path(__file__).parents[2]
ADRS = ROOT / "ADRs"
INDEX = ADRS / "README.md"
SECTIONS = ["Context", "Decision", "Consequences", "Alternatives rejected", "How it is checked"]
TEXTS = {".md", ".py", ".toml", ".json", ".html", ".yml", ".txt", ".ipynb", ""}
REFERENCE = re.compile(r"\bADRs?[ /\n]+(?:# )?(\d{4})((?:(?:, | and )\d{4})*)")
"""As in `ADR 0034`, `ADRs 0034 and 0037`, or the path of a record. The number may be on the next line of a comment."""
FILE_NAME = re.compile(r"[\w/]*\w+\.(?:py|html|txt|ipynb)\b")
"""A file in a piece of code. Names of records in a store end otherwise."""


RESERVED: frozenset[str] = frozenset()
"""The numbers of records that are being written on other branches. Remove a number when its record is here."""
FILES_OF_USERS = {
    *("train.py", "requirements.txt", "logging.py", "random.py", "numpy.py", "executors.py", "types.py", "utils.py"),
    *("test.py", "calendar.py", "queue.py", "my_jobs.py"),
}


def adrs() -> list[Path]:
    return sorted(ADRS.glob("[0-9]*.md"))


def number_of(adr: Path) -> str:
    return adr.name.partition("-")[0]


@cache
def tracked() -> frozenset[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return frozenset(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n"))


def references_in(text: str) -> list[str]:
    """Return the numbers of the records that a text refers to."""
    return [number for match in REFERENCE.finditer(text) for number in re.findall(r"\d{4}", match[0])]


def test_a_reference_is_found_in_each_form_that_people_write() -> None:
    assert references_in("see ADR 0034.") == ["0034"]
    assert references_in("by ADRs 0034 and 0037, with") == ["0034", "0037"]
    assert references_in("[ADR\n0045](ADRs/0045-reserved-names.md)") == ["0045", "0045"]
    assert references_in("# as ADR\n# 0043 has it") == ["0043"]


def test_each_reference_to_an_adr_names_one_that_exists() -> None:
    numbers = {number_of(adr) for adr in adrs()}
    wrong = []
    for name in sorted(tracked()):
        path = ROOT / name
        if path.suffix in TEXTS and path.is_file() and path != Path(__file__):
            wrong += [f"{name}: ADR {each}" for each in references_in(path.read_text("utf-8")) if each not in numbers]
    assert wrong == [], "no record has this number: it was absorbed by another record, or never existed"


def test_no_two_adrs_have_one_number() -> None:
    numbers = [number_of(adr) for adr in adrs()]
    assert sorted(set(numbers)) == numbers


@pytest.mark.parametrize("adr", adrs(), ids=number_of)
def test_an_adr_has_its_number_its_date_and_all_sections(adr: Path) -> None:
    text = adr.read_text("utf-8")
    assert re.match(rf"# {number_of(adr)}: \S.*\n\nStatus: accepted on 20\d\d-\d\d-\d\d", text), text[:200]
    assert [each for each in re.findall(r"^## (.+)$", text, flags=re.MULTILINE) if each in SECTIONS] == SECTIONS


@pytest.mark.parametrize("page", [*adrs(), INDEX, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_each_link_and_each_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    links = [target for target in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in target]
    assert [target for target in links if not (page.parent / target).exists()] == []
    named = {name for code in re.findall(r"`([^`\n]+)`", text) for name in FILE_NAME.findall(code)}
    missing = [name for name in named if not any(f"/{each}".endswith(f"/{name}") for each in tracked())]
    assert {*missing} <= FILES_OF_USERS, "add the name to FILES_OF_USERS, or correct it on the page"


def test_the_index_lists_each_adr_once_in_one_line_with_its_title() -> None:
    entries = re.findall(r"^- \[(\d{4})\]\((\S+?)\): \S.*$", INDEX.read_text("utf-8"), flags=re.MULTILINE)
    assert sorted(file for _, file in entries) == [adr.name for adr in adrs()]
    assert [number for number, file in entries if not file.startswith(f"{number}-")] == []


def test_the_number_of_an_absorbed_adr_is_not_used_again() -> None:
    """Older commits refer to it, so another record under this number would be taken for the old one."""
    rows = re.findall(r"^\| (\d{4}[^|]*) \| (\d{4}[^|]*) \|$", INDEX.read_text("utf-8"), flags=re.MULTILINE)
    absorbed = [number for old, _ in rows for number in re.findall(r"\d{4}", old)]
    numbers = {number_of(adr) for adr in adrs()}
    assert numbers & {*absorbed} == set(), (
        "a record has the number of an absorbed one: use the number after the highest in ADRs/README.md"
    )
    assert {number for _, new in rows for number in re.findall(r"\d{4}", new)} <= numbers
    missing = {f"{number:04}" for number in range(1, int(max(numbers)) + 1)} - numbers - RESERVED
    assert sorted(missing) == sorted(absorbed), "the table of absorbed records has each number that has no record"


@pytest.mark.parametrize("page", [*adrs(), INDEX, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_the_average_sentence_of_a_page_is_short(page: Path) -> None:
    report = language.report_of(str(page.relative_to(ROOT)))
    assert report.words / report.sentences <= language.GOOD_AVERAGE


def test_the_example_of_a_job_service_imports_what_exists_and_has_each_call_of_a_service() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), flags=re.DOTALL)
    tree = ast.parse(next(block for block in blocks if "class MyJobs(JobService)" in block))
    scope: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            exec(ast.unparse(node), scope)
    example = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "MyJobs")
    written = {node.name for node in example.body if isinstance(node, ast.FunctionDef)}
    service = scope["JobService"]
    assert service.__abstractmethods__ <= written, "the example of a service lacks an abstract method"
    assert [name for name in sorted(written) if not hasattr(service, name)] == []
