"""The page of a run in a real browser: it draws, fits the window, makes no request, and runs no text of a record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from support.made_up_runs import SCENES, calm, hostile, with_kills

from executors.view.report.document import document
from executors.view.report.page import page

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.timeout(300)]
NARROW, USUAL, WIDE = 400, 1280, 3840  # pixels; 400 are some 60 columns
CHARTS = {"calm": 3, "kills": 3, "large": 3, "failed": 0, "lone": 1, "beside": 3, "hostile": 1}
BLANK = """canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const seen = new Set();
    for (let at = 0; at < pixels.length; at += 4) if (pixels[at + 3]) seen.add(pixels.slice(at, at + 3).join(" "));
    return seen.size < 4;  // axes, grid, and text alone
}"""
REDRAWN = """width => [...document.querySelectorAll("canvas")].every(
    canvas => Math.abs(canvas.clientWidth - canvas.closest(".chart").clientWidth) < 2 && innerWidth === width)"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("pages")

    def write(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(page(document(SCENES[name]())), encoding="utf-8")
        return path

    return write


class Shown:
    """An open page, with all its requests and errors."""

    def __init__(self, browser: Any, path: Path, width: int = USUAL) -> None:
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("main[data-drawn]", state="attached")

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        self.page.close()


def until(tab: Any, predicate: str, given: Any = None) -> None:
    """Wait as `wait_for_function` does. That function calls eval() in the page, which the page's policy forbids."""
    deadline = monotonic() + 30
    while not tab.evaluate(predicate, given):
        assert monotonic() < deadline, predicate
        tab.wait_for_timeout(20)


@pytest.mark.parametrize("scene", SCENES)
def test_a_page_draws_every_chart_fits_any_width_and_asks_for_nothing(
    browser: Any, files: Callable[[str], Path], scene: str
) -> None:
    with (shown := Shown(browser, files(scene), NARROW)) as tab:
        for width, scheme, color in ((NARROW, "light", "rgb(255, 255, 255)"), (WIDE, "dark", "rgb(16, 21, 27)")):
            tab.set_viewport_size({"width": width, "height": 900})
            tab.emulate_media(color_scheme=scheme)
            until(tab, REDRAWN, width)
            canvases = tab.query_selector_all("canvas")
            assert len(canvases) == CHARTS[scene]
            assert not any(canvas.evaluate(BLANK) for canvas in canvases)
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == color
        assert shown.asked == [files(scene).as_uri()]
        assert shown.complaints == []


def test_text_of_a_run_runs_nothing(browser: Any, files: Callable[[str], Path]) -> None:
    with (shown := Shown(browser, files("hostile"))) as tab:
        tab.get_by_role("combobox").select_option(index=1)
        tab.get_by_role("link", name="job").hover()
        for summary in tab.query_selector_all("summary"):
            summary.evaluate("summary => { summary.parentElement.open = true }")
        assert tab.evaluate("window.pwned") is None
        assert tab.evaluate("document.querySelectorAll('main img, main script:not([type])').length") == 0
        assert tab.title() == "odd-magpie-0bad: failed"
        assert len(shown.asked) == 1
        assert shown.complaints == []


def test_injected_script_is_stopped_by_the_policy_of_the_page(browser: Any, tmp_path: Path) -> None:
    text = page(document(calm())).replace(
        "<header>", "<header><script>window.pwned = 1</script><p onclick='x' style='top:0'>"
    )
    (tmp_path / "page.html").write_text(text)
    with (shown := Shown(browser, tmp_path / "page.html")) as tab:
        assert tab.evaluate("window.pwned") is None
        assert any("Content Security Policy" in complaint for complaint in shown.complaints)


def test_each_chart_has_a_table_that_a_keyboard_opens(browser: Any, files: Callable[[str], Path]) -> None:
    with Shown(browser, files("kills")) as tab:
        for kind, head in (("curves", "step"), ("waited", "round"), ("norms", "round")):
            summary = tab.locator(f"figure.{kind} summary")
            summary.focus()
            tab.keyboard.press("Enter")
            table = tab.locator(f"figure.{kind} table")
            table.wait_for()
            assert table.locator("th").first.text_content() == head
            assert table.locator("tbody tr").count() > 50
        assert tab.locator("figure.curves table thead th").all_text_contents()[1] == "first loss after each round"
        lanes = tab.locator("section", has=tab.locator(".lanes")).locator("tbody tr")
        assert lanes.count() == 4


def test_an_event_is_marked_on_the_lane_with_a_tooltip_and_listed(browser: Any, files: Callable[[str], Path]) -> None:
    with Shown(browser, files("kills")) as tab:
        marks = tab.locator(".timeline path.hang title")
        assert marks.first.text_content().startswith("Rank 1 at ")
        assert "hang suspected: the GIL is held by a call" in marks.first.text_content()
        assert (
            "restarting rank 1 as attempt 1 (1 of 3)"
            in tab.locator(".timeline path.restart title").first.text_content()
        )
        assert "may hang" in tab.locator(".legend", has=tab.locator("path.hang")).text_content()
        rows = tab.locator("table.events tbody tr:visible")
        assert rows.count() == len(with_kills().events)
        assert tab.locator("table.events td.noted").first.text_content() == "hang suspected"


def test_any_reported_number_can_be_chosen_and_the_value_under_the_pointer_is_shown(
    browser: Any, files: Callable[[str], Path]
) -> None:
    with Shown(browser, files("calm")) as tab:
        options = tab.get_by_role("combobox").locator("option").all_text_contents()
        assert options == ["loss", "eval_loss", "lr"]
        tab.get_by_role("combobox").select_option("lr")
        assert tab.locator("figure.curves .legend li").first.text_content() == "median of replicas"
        tab.locator("figure.curves .u-over").hover()
        tip = tab.locator("figure.curves .tip").text_content()
        assert tip.startswith("step 300\nmedian of replicas: 3.00e-4\nrank ")
        tab.locator("svg.timeline").hover()
        assert "rank 2 at" in tab.locator(".lanes .tip").text_content()
        tab.set_viewport_size({"width": 700, "height": 900})
        until(tab, "() => document.querySelector('figure.curves canvas').clientWidth < 700")


def test_the_pointer_shows_the_duration_of_a_round_and_the_wait_that_it_caused(
    browser: Any, files: Callable[[str], Path]
) -> None:
    with Shown(browser, files("beside")) as tab:
        tab.locator("figure.waited .u-over").hover()
        tip = tab.locator("figure.waited .tip").text_content()
        assert "the round took: " in tip
        assert "and training waited for: " in tip
        lanes = tab.locator("svg.timeline").bounding_box()
        spans = document(SCENES["beside"]())["timeline"]
        _, since, to, names = spans["lanes"][1]["beside"][20]
        x = lanes["width"] * (since + to) / 2 / spans["end_s"]
        tab.locator("svg.timeline").hover(
            position={"x": x, "y": 1.5 * tab.locator(".lanes li").first.bounding_box()["height"]}
        )
        tip = tab.locator(".lanes .tip").text_content()
        assert f"{names}: training for " in tip
        assert f"{names}: a round while training continued for " in tip


def test_the_legend_names_each_rank_once_also_one_whose_first_attempt_left_no_line(
    browser: Any, tmp_path: Path
) -> None:
    subject = with_kills()
    unwritten = [row for row in subject.metrics.rows if (row.rank, row.attempt) != (1, 0)]
    made = document(replace(subject, metrics=replace(subject.metrics, rows=unwritten)))
    (tmp_path / "page.html").write_text(page(made), encoding="utf-8")
    with Shown(browser, tmp_path / "page.html") as tab:
        named = tab.locator("figure.curves .legend li").all_text_contents()
        assert named[1:] == ["rank 0", "rank 1, attempt 1", "rank 2", "rank 3"]


def test_the_page_draws_each_of_two_fragments(browser: Any, tmp_path: Path) -> None:
    from executors.view.report.page import fragment

    both = "<!DOCTYPE html>" + fragment(document(with_kills())) + fragment(document(hostile()))
    (tmp_path / "both.html").write_text(both, encoding="utf-8")
    with (shown := Shown(browser, tmp_path / "both.html")) as tab:
        assert tab.locator("canvas").count() == CHARTS["kills"] + CHARTS["hostile"]
        assert shown.complaints == []
