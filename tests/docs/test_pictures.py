"""Each picture of the documentation is made by its recipe, and has a text that describes it."""

from __future__ import annotations

import importlib
import re
import shutil
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.pictures import DRAWINGS, FOLDER, RECIPES, RECORDINGS
from docs.pictures.drawing import THEMES, WIDTH

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]
IN_A_BROWSER = ("report", "dashboard")
SHOWN = re.compile(
    r"!\[(?P<words>[^\]]*)\]\((?P<readme>[^)]+)\)|```\{image\} (?P<page>\S+)\n:alt: (?P<alt>.*)\n:class: (\S+)"
)


def files_of(name: str) -> set[str]:
    return {f"{name}-{theme.name}.{'png' if name in IN_A_BROWSER else 'svg'}" for theme in THEMES}


def check_picture(path: Path) -> None:
    """Check that a file is a picture, and that it loads nothing from another host."""
    if path.suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    text = path.read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.findall(r"(?:href|src)=.https?:|url\(.?https?:", text)


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_in_the_repository_is_the_one_of_its_recipe(name: str, tmp_path: Path) -> None:
    for path in importlib.import_module(f"docs.pictures.{name}").write(tmp_path):
        check_picture(path)
        assert path.read_text() == (FOLDER / path.name).read_text(), (
            "the drawing differs from its code: draw it again with `make pictures`"
        )


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_recipe_of_a_recording_still_makes_its_picture(name: str, tmp_path: Path) -> None:
    if name in IN_A_BROWSER and shutil.which("chromium") is None:
        pytest.skip("there is no chromium")
    paths = list(importlib.import_module(f"docs.pictures.{name}").write(tmp_path))
    assert {path.name for path in paths} == files_of(name)
    for path in paths:
        check_picture(path)


@pytest.mark.parametrize("name", DRAWINGS)
def test_no_text_of_a_drawing_is_cut_or_covered_by_another(name: str) -> None:
    drawing = importlib.import_module(f"docs.pictures.{name}").draw(THEMES[0])
    for words, left, right, _ in drawing.texts:
        assert left >= 0, words
        assert right <= WIDTH, words
    for (one, left, right, y), (other, begin, end, z) in combinations(drawing.texts, 2):
        assert abs(y - z) > 10 or right <= begin or end <= left, f"{one!r} and {other!r} overlap"


def contrast(color: str, other: str) -> float:
    """Return the contrast of two colors as WCAG 2.2 defines it, from 1 to 21."""

    def luminance(value: str) -> float:
        parts = [int(value[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(color), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: str(theme.name))
def test_each_text_of_a_drawing_is_legible_on_its_background(theme: object) -> None:
    (found,) = [each for each in THEMES if each is theme]
    page = {"light": "#ffffff", "dark": "#14181e"}[found.name]
    for color in (found.ink, found.faint, *found.colors.values()):
        assert min(contrast(color, page), contrast(color, found.fill)) >= 4.5, color


def test_each_picture_is_on_a_page_in_both_themes_with_words_for_those_who_do_not_see_it() -> None:
    shown: dict[str, str] = {}
    for page in PAGES:
        for match in SHOWN.finditer(page.read_text(encoding="utf-8")):
            path = (page.parent / (match["readme"] or match["page"])).resolve()
            assert path.is_file(), f"{page.name} shows {path.name}, which does not exist"
            assert len((match["words"] or match["alt"]).split()) >= 5, f"{page.name}: say what {path.name} shows"
            if match["page"] and path.parent == FOLDER:
                shown[path.name] = match[5]
    assert shown == {file: f"only-{theme}" for name in RECIPES for file in files_of(name) for theme in theme_of(file)}


def theme_of(file: str) -> list[str]:
    return [theme.name for theme in THEMES if f"-{theme.name}." in file]
