"""The site builds without a warning and without network, and the reference lists everything that is public."""

from __future__ import annotations

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.build_docs import build_site

from docs.generate.outcomes import EXIT_CODES, REASONS
from docs.generate.surface import SURFACE, surface
from executors.cli import output
from executors.protocol import REASONS as ALL_REASONS

FROM_THE_CODE = ("FAILED", "USAGE", "PERMANENT", "TIMED_OUT", "CANCELLED")
QUESTIONS = Path(__file__).with_name("questions.toml")
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built as `make docs` builds it."""
    return build_site(tmp_path_factory.mktemp("site"))


class Loads(HTMLParser):
    """Collects the addresses that a browser loads to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADED and given.get("rel") not in ("canonical", "alternate") and (value := given.get(LOADED[tag])):
            self.addresses.append(value)


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    found = []
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        found += [f"{page.name}: {each}" for each in loads.addresses if re.match(r"(https?:)?//", each)]
    assert not found, "\n".join(found)


def test_each_cell_of_a_wide_table_names_its_column(site: Path) -> None:
    """On a narrow screen the cells of a row stack, and a number without its column has no meaning."""
    page = (site / "results" / "outer_settings.html").read_text(encoding="utf-8")
    wide = page.rpartition("<table")[2]
    assert wide.count("<td") == wide.count('data-column="')
    assert 'data-column="inner_steps"' in wide
    compares = (site / "how-to" / "multi-gpu.html").read_text(encoding="utf-8")
    assert 'data-column="one replica for each machine"' in compares
    narrow = (site / "reference" / "exit-codes.html").read_text(encoding="utf-8")
    assert "data-column" not in narrow


def test_no_style_sheet_loads_anything_from_another_host(site: Path) -> None:
    sheets = [path.read_text(encoding="utf-8", errors="replace") for path in site.rglob("*.css")]
    assert not [each for text in sheets for each in re.findall(r"url\(['\"]?(https?://[^)]*)", text)]


def test_each_page_can_be_reached_from_the_index(site: Path) -> None:
    reached, waiting = set[Path](), [site / "index.html"]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.is_file():
            continue
        reached.add(page)
        waiting += links_of(page)
    pages = {path.resolve() for path in site.rglob("*.html")}
    assert {path.name for path in pages - reached} <= {"genindex.html", "search.html", "webpack-macros.html"}


def links_of(page: Path) -> set[Path]:
    """Return the pages of the site that a page links to."""
    links = re.findall(r'<a [^>]*href="([^"#]+\.html)', page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links if "//" not in link}


def test_each_first_question_has_an_answer_at_most_two_links_from_the_index(site: Path) -> None:
    first = links_of(site / "index.html")
    near = first.union(*(links_of(page) for page in first if page.is_file()))
    missing = []
    for reader in tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))["reader"]:
        assert len(reader["questions"]) == 5
        for question in reader["questions"]:
            page = (site / f"{question['page']}.html").resolve()
            has_section = page.is_file() and f'id="{question["section"]}"' in page.read_text(encoding="utf-8")
            if page not in near or not has_section:
                missing.append(f"{reader['name']}: {question['asks']} ({question['page']}#{question['section']})")
    assert not missing, "\n".join(missing)


def test_the_site_as_text_has_a_line_for_each_page(site: Path) -> None:
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", (site / "llms.txt").read_text(encoding="utf-8"), flags=re.M)
    pages = {str(path.relative_to(site).with_suffix(".md")) for path in site.rglob("*.html")}
    assert set(listed) == {each for each in pages if not each.startswith("_static")} - {"genindex.md", "search.md"}
    assert all((site / page).is_file() for page in listed)


def test_the_surface_file_lists_exactly_what_is_public() -> None:
    assert SURFACE.read_text(encoding="utf-8") == surface(), (
        "docs/surface.txt differs from the public names: write it again with `make surface`"
    )


def test_each_reason_of_an_outcome_is_explained() -> None:
    assert tuple(sorted(REASONS)) == tuple(sorted(ALL_REASONS))


def test_each_exit_code_is_explained() -> None:
    assert sorted(EXIT_CODES) == sorted({0, *(getattr(output, name) for name in FROM_THE_CODE)})
