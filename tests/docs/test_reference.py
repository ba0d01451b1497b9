"""Everything that `docs/surface.txt` lists has exactly one place in the reference."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

from docs.generate.command import with_option_names
from docs.generate.pages import PAGES
from docs.generate.surface import surface

ANCHOR = re.compile(r"^\(([\w.-]+)\)=$", re.M)
HOME = {
    "setting": "settings.md",
    "exit": "exit-codes.md",
    "outcome": "outcomes.md",
    "key": "stored-keys.md",
    "metric": "metrics.md",
}
"""For each kind of line whose entries are rows of one page: the page."""
WITH_SECTIONS = {"python", "command", "backend", "json"}
"""The kinds of lines whose entries have a section with an anchor."""


@cache
def pages() -> dict[str, str]:
    """Return the text of each generated page of the reference, by its name."""
    return {
        name.removeprefix("reference/"): page() for name, page in PAGES.items() if re.match(r"reference/.*\.md$", name)
    }


@cache
def sections() -> dict[str, str]:
    """Return the text of each section of the reference, by its anchor."""
    found: dict[str, str] = {}
    for text in pages().values():
        parts = ANCHOR.split(text)
        found |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return found


@cache
def lines() -> dict[str, list[str]]:
    """Return the lines of the surface by their first word, without it."""
    found: dict[str, list[str]] = {}
    for line in surface().splitlines():
        kind, _, rest = line.partition(" ")
        found.setdefault(kind, []).append(rest)
    return found


def first_cells(text: str) -> Iterator[str]:
    """Yield the first cell of each row of each table. A vertical line within a cell is escaped."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield re.split(r"(?<!\\) \| ", line[2:])[0].replace("\\|", "|")


def names_in(text: str) -> Counter[str]:
    """Count the names in the first cells of the tables of a text. A cell may have several, such as `--out`, `-o`."""
    return Counter(name.lstrip("*") for cell in first_cells(text) for name in re.findall(r"`([^`]+)`", cell))


def test_each_kind_of_line_has_its_pages() -> None:
    assert set(lines()) == {*HOME, *WITH_SECTIONS}


def test_no_two_sections_have_the_same_anchor() -> None:
    anchors = Counter(anchor for text in pages().values() for anchor in ANCHOR.findall(text))
    assert [anchor for anchor, n in anchors.items() if n > 1] == []


def test_each_setting_exit_code_reason_key_and_column_has_one_row_on_its_page() -> None:
    wrong = []
    for kind, page in HOME.items():
        rows = Counter(cell.strip("`") for cell in first_cells(pages()[page]))
        for entry in lines()[kind]:
            name = entry.split()[-1]
            wrong += [] if rows[name] == 1 else [f"{page}: {name} has {rows[name]} rows"]
    assert wrong == []


def test_each_public_name_has_one_section_with_each_of_its_parameters() -> None:
    wrong = []
    for entry in lines()["python"]:
        path, _, words = entry.partition("(")
        text = sections().get(path)
        if text is None:
            wrong.append(f"{path} has no section")
            continue
        if found := re.search(r"\(backends\.md#(backend-\w+)\)", text):
            text = sections()[found[1]]
        rows = names_in(text)
        # Errors of one family have the same attributes, and the first of them describes these.
        parameters = [] if path.startswith(("executors.errors.", "diloco.errors.")) else words.strip(")").split(", ")
        named = [each.strip("*=") for each in parameters if each]
        wrong += [f"{path}: {name} has {rows[name]} rows" for name in named if rows[name] != 1]
    assert wrong == []


def test_no_section_describes_a_name_that_is_not_public() -> None:
    public = {entry.partition("(")[0] for entry in lines()["python"]}
    assert {anchor for anchor in sections() if anchor.startswith(("executors.", "diloco."))} - public == set()


def test_each_verb_has_one_section_with_each_of_its_options() -> None:
    wrong = []
    for entry in lines()["command"]:
        verb, _, option = entry.partition(" ")
        rows = names_in(sections()[f"replicas-{verb}"])
        for name in filter(None, option.split(", ")):
            wrong += [] if rows[name] == 1 else [f"replicas {verb}: {name} has {rows[name]} rows"]
    assert wrong == []


def test_each_backend_has_one_section_with_each_of_its_options() -> None:
    wrong = []
    for entry in lines()["backend"]:
        backend, _, option = entry.partition(" ")
        rows = names_in(sections()[f"backend-{backend}"])
        wrong += [] if not option or rows[option] == 1 else [f"{backend}: {option} has {rows[option]} rows"]
    assert wrong == []


def test_each_json_document_has_one_section_with_each_of_its_fields() -> None:
    wrong = []
    for entry in lines()["json"]:
        document, _, field = entry.partition(" ")
        rows = names_in(sections()[f"json-{document}"])
        name = field.rpartition(".")[2]
        wrong += [] if not field or rows[name] >= 1 else [f"{document}: {field} has no row"]
    assert wrong == []


def test_an_option_in_a_help_text_is_code_on_a_page() -> None:
    assert with_option_names("Needs --restarts, or `a --b`.") == "Needs `--restarts`, or `a --b`."
    assert with_option_names("Words after -- are a command; --n N.") == "Words after -- are a command; `--n` N."
