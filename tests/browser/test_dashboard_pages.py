"""The dashboard in a real browser: list, a curve that grows during a run with a kill, logs, buttons, hostile text."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from support.cli import Folder
from support.dashboards import Client, running_dashboard
from support.hostile_records import outcome_json, run_json
from support.made_up_runs import HOSTILE
from support.runs import pid_of

from executors import LocalProcessExecutor, launch
from executors.attempt import replica_key
from executors.dashboard.server import Options
from executors.store import open_store

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser"), pytest.mark.timeout(300)]
NARROW, USUAL = 400, 1280
TRAIN = """
import time
from executors import current_replica

def main():
    for step in range(1, 100000):
        current_replica().report(step=step, loss=10 / step)
        print(f"step {step} <b>bold</b>", flush=True)
        time.sleep(0.05)
        if current_replica().ending_s is not None:
            return "stopped"
"""


@pytest.fixture
def client(state_home: Path) -> Iterator[Client]:
    with running_dashboard() as made:
        yield made


class Tab:
    """An open page of the dashboard, with all its requests and errors."""

    def __init__(self, browser: Any, client: Client, width: int = USUAL, scheme: str = "light") -> None:
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self._context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self._context.new_page()
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.goto(client.dashboard.address())

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def until(self, predicate: Callable[[], Any]) -> Any:
        """Wait until the page shows something. `wait_for_function` would call eval(), which the policy forbids."""
        deadline = monotonic() + 60
        while not (found := predicate()):
            assert monotonic() < deadline, self.page.locator("main").inner_text()
            self.page.wait_for_timeout(50)
        return found

    def text(self, selector: str) -> str:
        return " ".join(self.page.locator(selector).all_inner_texts())

    def check(self, client: Client) -> None:
        """Check that nothing complained, and that no other host was asked."""
        assert self.complaints == []
        assert {url.startswith(client.origin + "/") or url == "data:," for url in self.asked} == {True}


def last_step(tab: Tab) -> float:
    """Return the last step of the loss in the data of the chart's table."""
    steps = tab.page.locator("figure.curves tbody th").all_text_contents()
    return max((float(step.replace(",", "")) for step in steps), default=0.0)


def test_the_page_of_a_run_shows_a_kill_its_log_and_its_end_and_a_button_stops_it(
    browser: Any, client: Client, folder: Folder, local: LocalProcessExecutor
) -> None:
    (folder.path / "train.py").write_text(TRAIN)
    with launch(local, "train:main", 2, run_id="live", restarts=2) as run, Tab(browser, client) as tab:
        page = tab.page
        assert "token" not in page.url
        tab.until(lambda: "2 running" in tab.text("tbody.rows"))
        tab.until(lambda: page.locator("svg.spark path").count())
        page.get_by_role("link", name="live").click()
        tab.until(lambda: page.locator("figure.curves canvas").count())
        page.locator("figure.curves summary").click()
        first = tab.until(lambda: last_step(tab))
        os.kill(pid_of(run.handles[1]), signal.SIGKILL)
        tab.until(lambda: last_step(tab) > first)
        tab.until(lambda: "restarting rank 1" in page.locator("table.events").text_content())
        assert page.locator("figure.curves details").get_attribute("open") is not None, "an update keeps it open"
        page.locator("details.logs summary").click()
        page.locator("details.logs select.rank").select_option("1")
        tab.until(lambda: "=== attempt 1 ===" in tab.text("pre.log"))
        n = tab.text("pre.log").count("\n")
        tab.until(lambda: tab.text("pre.log").count("\n") > n)
        assert "<b>bold</b>" in tab.text("pre.log")
        page.locator("input.search").fill("STEP 7 <b>")
        page.keyboard.press("Enter")
        tab.until(lambda: {line[:7] for line in tab.text("pre.log").splitlines()} == {"step 7 "})
        page.get_by_role("button", name="Stop").click()
        assert "after its next round" in tab.text(".confirm .question")
        page.get_by_role("button", name="No").click()
        assert not page.locator(".confirm").is_visible()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Yes, stop").click()
        tab.until(lambda: "The run was stopped" in tab.text('[data-part="state"]'))
        tab.until(lambda: "running" not in tab.text("h1"))
        tab.until(lambda: page.get_by_role("button", name="Resume").count())
        page.get_by_role("link", name="All runs").click()
        tab.until(lambda: page.locator("tbody.rows .status.running").count() == 0)
        tab.check(client)


def test_a_tab_without_the_token_shows_nothing(browser: Any, client: Client) -> None:
    page = browser.new_page()
    assert page.goto(client.origin).status == 403
    assert page.inner_text("body").strip() == "Forbidden"
    page.close()


def write_hostile_store(folder: Path) -> None:
    """Write runs whose every text is hostile."""
    store = open_store(folder)
    for run_id, status in (("odd-magpie-0bad", "failed"), ("calm-heron-0001", "succeeded")):
        record = run_json(world_size=1, entrypoint=f"{HOSTILE}:main", created_by=HOSTILE, cwd=HOSTILE)
        store.put(f"{run_id}/run.json", json.dumps(record).encode())
        more = {"error": HOSTILE, "output_tail": f"{HOSTILE}\n" * 3} if status == "failed" else {}
        outcome = outcome_json(0, status=status, **more, **({"reason": "exception"} if status == "failed" else {}))
        store.put(replica_key(run_id, 0, 0, "outcome.json"), json.dumps(outcome).encode())
        store.put(replica_key(run_id, 0, 0, "stacks/0.txt"), HOSTILE.encode())
        line = json.dumps({"t": 1.0, "step": 1, "loss": 2.0, HOSTILE: 1.0})
        store.put(f"{run_id}/metrics/0000/0/000000.jsonl", line.encode())
    for name in ("<img src=x onerror=alert(1)>", "..", "a b", "'; --"):
        (folder / name).mkdir(exist_ok=True)


@pytest.mark.parametrize(("width", "scheme"), [(NARROW, "dark"), (USUAL, "light")])
def test_hostile_text_of_a_store_runs_nothing_and_fits_each_width(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    write_hostile_store(tmp_path)
    with running_dashboard(Options(store=tmp_path, port=0)) as client, Tab(browser, client, width, scheme) as tab:
        page = tab.page
        tab.until(lambda: page.locator(".status.failed").count() == 1)
        assert page.locator("tbody.rows tr").count() == 2
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.get_by_role("link", name="odd-magpie-0bad").click()
        tab.until(lambda: "failed" in tab.text("h1") and page.locator("table").count() > 1)
        page.locator("details.logs summary").click()
        tab.until(lambda: "window.pwned" in tab.text("pre.log"))
        page.get_by_role("button", name="Stacks").click()
        tab.until(lambda: "=== attempt 0 ===" in tab.text("pre.log"))
        assert page.evaluate("window.pwned") is None
        assert page.locator("main img, main script:not([type])").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(16, 21, 27)" if scheme == "dark" else "rgb(255, 255, 255)"
        )
        tab.check(client)
