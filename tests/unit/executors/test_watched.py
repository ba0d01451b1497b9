"""The watch of a replica when one process of its command takes over from another that has ended."""

from __future__ import annotations

import os

import pytest

from executors.replica.shared_page import SharedPage
from executors.worker import watched

OWN = (3, 4711)
"""The file for the stacks of the process that beats here, and its main thread."""
FIRST, SECOND = 1001, 1002
SECOND_OWN = (5, 4712)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> SharedPage:
    def beats() -> float:
        raise SystemExit  # ends the loop, which has no end otherwise

    monkeypatch.setattr(watched, "monotonic", beats)
    return SharedPage()


def test_a_worker_leaves_the_watch_to_a_process_that_took_over_while_the_worker_looked_for_the_one_before(
    page: SharedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_time(pid: int) -> int | None:
        if pid == SECOND:
            raise SystemExit
        page.watched, page.stacks_file, page.main_thread = SECOND, *SECOND_OWN  # on macOS, a look takes 0.1 s
        return None

    monkeypatch.setattr(watched, "start_time", start_time)
    page.watched = FIRST
    with pytest.raises(SystemExit):
        watched._beat(page, OWN, is_speaker=False)
    assert (page.watched, page.stacks_file, page.main_thread) == (SECOND, *SECOND_OWN)


def test_a_process_of_a_command_gets_the_watch_back_if_the_worker_took_it_at_the_same_time(page: SharedPage) -> None:
    page.watched, page.stacks_file, page.main_thread = 0, *SECOND_OWN
    with pytest.raises(SystemExit):
        watched._beat(page, OWN, is_speaker=True)
    assert (page.watched, page.stacks_file, page.main_thread) == (os.getpid(), *OWN)


def test_a_worker_takes_the_watch_back_from_a_process_that_has_ended(
    page: SharedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "start_time", lambda pid: None)
    page.watched, page.stacks_file, page.main_thread = FIRST, *SECOND_OWN
    with pytest.raises(SystemExit):
        watched._beat(page, OWN, is_speaker=False)
    assert (page.watched, page.stacks_file, page.main_thread) == (0, *OWN)
