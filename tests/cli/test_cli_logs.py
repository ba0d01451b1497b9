"""`replicas logs`: earlier attempts, progress bars, and the place from which a log of another machine is read."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.cli import Folder, HereInstead, Terminal

from executors import LocalProcessExecutor, Run, attach, launch
from executors.logs.times import PAIR, times_of
from executors.run.resume import resume
from executors.run.run import view_of
from executors.status import ReplicaState
from executors.testing import eventually
from executors.view.run_state_reader import RunStateReader

BARS = """
import sys
from executors import current_replica

def bar():
    for percent in range(0, 101, 10):
        print(f"\\r{percent} %", end="")
    print()
    print("[0] \\rover\\r\\n", end="")

def of_members():
    import os
    replica = current_replica()
    print(f"of {replica.rank}.{replica.member}")
    print("[7] is not a number of a process" if replica.member == 0 else "\\r10 %\\r20 %")

SPOILS = "\\x1b]0;title\\x07\\x1b[2J\\x9b2J\\u202e\\x1bc\\x1b[31mred\\tand\\x1b[0m plain\\x08"

def spoil():
    print(SPOILS)

def fail_once():
    print("attempt", current_replica().attempt, "of rank", current_replica().rank, flush=True)
    if current_replica().rank == 1 and current_replica().attempt == 0:
        raise RuntimeError("not yet")
"""


@pytest.fixture
def bars(here: HereInstead) -> HereInstead:
    (here.folder.path / "bars.py").write_text(BARS)
    return here


@pytest.fixture
def spoiled(bars: HereInstead, local: LocalProcessExecutor) -> Folder:
    """The folder of a run whose log has control sequences of a terminal."""
    run = launch(local, "bars:spoil", 1, run_id="mine")
    assert run.wait(60)
    return bars.folder


def test_a_terminal_gets_colors_of_a_log_and_nothing_else_that_it_would_obey(spoiled: Folder) -> None:
    terminal = Terminal(spoiled, "logs", "mine")
    assert terminal.ends() == 0
    terminal.close()
    shown = terminal.raw.strip()
    assert "\x1b[31mred\tand\x1b[0m plain" in shown
    assert set(re.findall("[^ -~\t\r\n]", shown)) == {"\x1b"}
    assert all(each.endswith("m") for each in re.findall("\x1b(?:.*?[A-Za-z])?", shown))


def test_a_pipe_gets_a_log_as_it_was_written(spoiled: Folder) -> None:
    said = spoiled.replicas("logs", "mine", "--rank", 0).stdout
    assert said == "\x1b]0;title\x07\x1b[2J\x9b2J\u202e\x1bc\x1b[31mred\tand\x1b[0m plain\x08\n"


def resumed(local: LocalProcessExecutor) -> Run:
    """A run of two ranks. Rank 1 has two attempts."""
    run = launch(local, "bars:fail_once", 2, run_id="mine")
    assert run.wait(60)
    run = resume(run)
    assert run.wait(60)
    return run


def test_earlier_attempts_are_shown_by_number_or_all_with_a_line_before_each(
    bars: HereInstead, local: LocalProcessExecutor
) -> None:
    resumed(local)
    cases: dict[tuple[object, ...], str] = {
        (): "[0] attempt 0 of rank 0\n[1] attempt 1 of rank 1\n",
        ("--attempt", 1): "[1] attempt 1 of rank 1\n",
        ("--attempt", 0, "-r", 1, "-n", 99): "attempt 0 of rank 1\nTraceback",
        ("--attempt", "all", "-r", 0): "=== attempt 0 ===\nattempt 0 of rank 0\n",
        (
            "--attempt",
            "all",
            "-r",
            1,
            "-n",
            1,
        ): "=== attempt 0 ===\nRuntimeError: not yet\n=== attempt 1 ===\nattempt 1",
        ("-f", "--attempt", "all", "-r", 1, "-n", 1): "=== attempt 0 ===\nRuntimeError: not yet\n=== attempt 1 ===\nat",
        ("-f", "--attempt", 0, "-r", 1): "attempt 0 of rank 1\nTraceback",
    }
    for arguments, beginning in cases.items():
        shown = bars.replicas("logs", "mine", *arguments)
        assert (shown.code, shown.stdout.startswith(beginning)) == (0, True), (arguments, shown)
    for wrong, message in (
        (2, "attempt must be from 0 to 1, or 'all', got 2."),
        ("x", "must be a number or 'all', got 'x'"),
    ):
        refused = bars.replicas("logs", "mine", "--attempt", wrong)
        assert (refused.code, message in refused.stderr) == (2, True), refused


def test_lines_are_chosen_and_led_as_asked(bars: HereInstead, local: LocalProcessExecutor, state_home: Path) -> None:
    resumed(local)
    now = time.time()
    for rank, attempt in ((0, 0), (1, 0), (1, 1)):
        log = state_home / f"replicas/mine/replicas/{rank:04d}/{attempt}/output.log"
        times_of(log).write_bytes(PAIR.pack(now - 7200, 0) + PAIR.pack(now - 3600, log.stat().st_size))
    cases: dict[tuple[object, ...], str] = {
        ("--grep", "of rank"): "[0] attempt 0 of rank 0\n[1] attempt 1 of rank 1\n",
        ("--grep", "^attempt", "--attempt", "all", "-r", "0-1", "--prefix", "{run_id} {rank}.{attempt}: "): (
            "mine 0.0: attempt 0 of rank 0\nmine 1.0: attempt 0 of rank 1\nmine 1.1: attempt 1 of rank 1\n"
        ),
        ("-f", "--grep", "rank 1", "--prefix", "{rank:03}|"): "001|attempt 1 of rank 1\n",
        ("-r", "1,0", "--grep", "no such line"): "",
        ("-r", 0, "--since", "3h", "--until", "30m"): "attempt 0 of rank 0\n",
        ("-r", 0, "--since", "30m"): "",
        ("-r", 0, "--since", "2001-02-03", "--until", "2001-02-03T12:30"): "",
    }
    for arguments, expected in cases.items():
        shown = bars.replicas("logs", "mine", *arguments)
        assert (shown.code, shown.stdout) == (0, expected), (arguments, shown)
    run = attach("mine")
    assert run.logs(1, attempt="all", grep="^Runtime") == run.logs(1, attempt=0, grep="^Runtime") != ""
    assert (run.logs(0, since=60), run.logs(0, since=10_000)) == ("", "attempt 0 of rank 0\n")


def test_as_json_a_rank_that_lacks_the_attempt_is_left_out_and_one_look_is_of_all(
    bars: HereInstead, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed(local)
    looks, look = list[Sequence[int] | None](), RunStateReader.look

    def counted(self: RunStateReader, ranks: Sequence[int] | None = None) -> list[ReplicaState]:
        looks.append(ranks)
        return look(self, ranks)

    monkeypatch.setattr(RunStateReader, "look", counted)
    for arguments, rows in (
        (("--attempt", 1), [(1, "attempt 1 of rank 1\n")]),
        ((), [(0, "attempt 0 of rank 0\n"), (1, "attempt 1 of rank 1\n")]),
        (("--grep", "rank 1"), [(0, ""), (1, "attempt 1 of rank 1\n")]),
    ):
        looks.clear()
        shown = bars.replicas("logs", "mine", "--json", *arguments)
        assert (shown.code, [(row["rank"], row["log"]) for row in shown.json["replicas"]]) == (0, rows), shown
        assert looks == [[0, 1]]


def test_all_matching_lines_of_a_long_log_are_shown_and_omitted_lines_are_counted(
    bars: HereInstead, local: LocalProcessExecutor, state_home: Path
) -> None:
    assert launch(local, "bars:fail_once", 1, run_id="mine").wait(60)
    (log,) = state_home.rglob("output.log")
    text = "".join(f"step {number:06} {'é' * 40} loss=1\n" for number in range(60_000))
    log.write_text(text)
    found = bars.replicas("logs", "mine", "-r", 0, "--grep", "loss=")
    assert (found.code, found.stdout == text, found.stderr) == (0, True, "")
    assert bars.replicas("logs", "mine", "--grep", "loss=", "--json").json["replicas"][0]["log"] == text
    for arguments, words in (
        ((), "these are the last 4 MiB; `replicas collect --out DIR` writes all"),
        (("-r", 0), "these are the last 4 MiB; `replicas collect --out DIR` writes all"),
        (("--prefix", "{run_id}" * 30, "--grep", "loss="), "these are the last 4 MiB of what was found"),
    ):
        shown = bars.replicas("logs", "mine", "-n", 10**8, *arguments)
        assert (shown.code, shown.stderr) == (0, f"Note: Rank 0: {words}.\n"), arguments
        assert shown.stdout.endswith("step 059999 " + "é" * 40 + " loss=1\n")


def test_the_lines_of_one_process_of_a_replica_are_chosen_by_its_number(
    bars: HereInstead, local: LocalProcessExecutor
) -> None:
    assert launch(local, "bars:of_members", 2, run_id="mine", procs=2).wait(60)
    leader, follower = ["of 1.0", "[7] is not a number of a process"], ["[1] of 1.1", "[1] 20 %"]
    for follow in ([], ["--follow"]):
        for asked, expected in (
            ("1.0", leader),
            ("1.1", follower),
            ("1.0,1.1", leader + follower),
            ("1.1,1", leader + follower),
        ):
            shown = bars.replicas("logs", "mine", "-r", asked, *follow)
            assert (shown.code, sorted(shown.stdout.splitlines())) == (0, sorted(expected)), shown
    assert bars.replicas("logs", "mine", "-r", "1.1", "-n", 1, "--grep", "of").stdout == "[1] of 1.1\n"
    for more in ((), ("--follow",), ("--follow", "--attempt", "all")):
        for asked, last in (("1.0", leader[-1]), ("1.1", follower[-1])):
            shown = bars.replicas("logs", "mine", "-r", asked, "-n", 1, *more)
            lines = [line for line in shown.stdout.splitlines() if "===" not in line]
            assert lines == [last], "the lines of the other process count"
    rows = bars.replicas("logs", "mine", "-r", "0,1.1", "--json").json["replicas"]
    assert [(row["rank"], row["members"]) for row in rows] == [(0, None), (1, [1])]
    assert rows[1]["log"] == "[1] of 1.1\n[1] 20 %\n"
    run = attach("mine")
    assert run.logs(1, member=0).splitlines() == leader
    assert sorted(run.logs(member=1, grep="of").splitlines()) == ["[0] [1] of 0.1", "[1] [1] of 1.1"]
    assert list(run.logs(1, follow=True, member=1)) == ["[1] of 1.1\n", "[1] \r10 %\r20 %\n"]


def test_a_process_that_a_replica_does_not_have_is_refused(bars: HereInstead, local: LocalProcessExecutor) -> None:
    assert launch(local, "bars:of_members", 1, run_id="mine", procs=2).wait(60)
    assert launch(local, "bars:bar", 1, run_id="other").wait(60)
    for run, asked, message in (
        ("mine", "0.2", "Rank 0 has the processes 0 to 1, got process 2 of rank 0."),
        ("other", "0.1", "Rank 0 has one process, 0, got process 1 of rank 0."),
        ("mine", "1.0", "has no rank 1"),
        ("mine", "0.x", "'0.x' does not name a process of a replica. Write 2.1 for process 1 of rank 2."),
        ("mine", "0.1 --stacks", "--stacks shows the stacks of all processes"),
    ):
        refused = bars.replicas("logs", run, "-r", *asked.split())
        assert (refused.code, message in refused.stderr) == (2, True), refused
    with pytest.raises(ValueError, match="Rank 0 has the processes 0 to 1, got process 2"):
        attach("mine").logs(0, member=2)


REFUSED = (
    ("--prefix {rnak}", "'{rnak}': No field 'rnak'. Did you mean 'rank'?"),
    ("--prefix {rank", "The prefix '{rank': "),
    ("--prefix {rank:d3}", "The prefix '{rank:d3}': "),
    ("--prefix {rank} --json", "Remove --json or --prefix."),
    ("--grep (", "--grep '(' is not a regular expression"),
    ("--since yesterday", "'yesterday' is not a time. Give a duration before now (90, 90s"),
    ("--since 1m --follow", "Remove --follow, or --since and --until."),
    ("--since 1m", "Rank 0 has no times of its lines: the times of the lines of "),
    ("--stacks --grep x", "--stacks shows complete stacks. Remove --grep."),
    ("-r 0-", "'0-' does not name ranks. Write 3, or 0,2-5."),
    ("-r 5-2", "'5-2' does not name ranks"),
    ("-r 0-9", "has no rank 2, but ranks 0-1."),
)


def test_logs_refuses_attempts_and_ranks_that_it_cannot_show(
    bars: HereInstead, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(local, "bars:bar", 2, run_id="mine").wait(60)
    monkeypatch.setattr("executors.logs.times.NAME", "nobody.wrote.them")
    for arguments, message in REFUSED:
        refused = bars.replicas("logs", "mine", *arguments.split())
        assert (refused.code, message in refused.stderr) == (2, True), (arguments, refused)


def test_stacks_are_shown_of_the_newest_attempt_that_has_any(bars: HereInstead, local: LocalProcessExecutor) -> None:
    run = launch(local, "bars:bar", 2, run_id="mine")
    assert run.wait(60)
    assert "No stacks exist of ranks 0-1." in bars.replicas("logs", "mine", "--stacks").stderr
    for attempt, number in ((0, 0), (1, 0), (1, 1)):
        view_of(run).store.put(
            f"mine/replicas/0001/{attempt}/stacks/{number}.txt", f"hung {attempt}\x1b[2J\n  File".encode()
        )
    shown = bars.replicas("logs", "mine", "--stacks")
    head, *rest = shown.stdout.splitlines()
    assert head.startswith("=== rank 1, attempt 1, 20")
    assert [line for line in rest if not line.startswith("===")] == ["hung 1", "  File"] * 2
    rows = bars.replicas("logs", "mine", "--stacks", "--attempt", "all", "--json").json["stacks"]
    assert [(row["rank"], row["attempt"], row["number"]) for row in rows] == [(1, 0, 0), (1, 1, 0), (1, 1, 1)]


def test_a_progress_bar_is_shown_as_a_terminal_shows_it_in_the_end_and_raw_on_demand(
    bars: HereInstead, local: LocalProcessExecutor
) -> None:
    assert launch(local, "bars:bar", 2, run_id="mine").wait(60)
    for follow in ([], ["-f"]):
        shown = bars.replicas("logs", "mine", *follow).stdout.splitlines()
        assert sorted(shown) == ["[0] 100 %", "[0] over", "[1] 100 %", "[1] over"]
        assert bars.replicas("logs", "mine", "-r", 1, *follow).stdout == "100 %\nover\r\n"
        assert "\r90 %\r100 %\n" in bars.replicas("logs", "mine", "-r", 1, "--raw", *follow).stdout
    assert "\r90 %" in attach("mine").logs(rank=1)


def test_elsewhere_a_log_is_read_in_the_rendezvous_and_that_is_reported(
    bars: HereInstead, local: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(local, "bars:fail_once", 1, run_id="mine", rendezvous=tmp_path / "there")
    assert run.wait(60)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    copy = tmp_path / "there" / "mine" / "replicas" / "0000" / "0" / "output.log"
    for follow in ([], ["-f"]):
        shown = bars.replicas("logs", run.url, "-r", 0, *follow)
        assert (shown.code, shown.stdout) == (0, "attempt 0 of rank 0\n")
        assert "Note: Rank 0: read from 'mine/replicas/0000/0/output.log' in file://" in shown.stderr
        assert shown.stderr.endswith(" s old.\n")
    copy.unlink()
    shown = bars.replicas("logs", run.url, "-r", 0)
    assert shown.stdout == "attempt 0 of rank 0\n"
    assert "local has no log of it. This was kept by its outcome, 'mine/replicas/0000/0/outcome.json'." in shown.stderr


def test_logs_of_another_user_before_the_first_copy_report_that(
    here: HereInstead, local: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(local, "job:hang", 1, run_id="mine", rendezvous=tmp_path / "there")
    eventually(lambda: "hanging" in run.logs(rank=0))
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
        for more in (["-n", 3], ["--json"], ["--grep", "line"]):
            shown = here.replicas("logs", run.url, *more)
            assert (shown.code, shown.json["replicas"][0]["log"] if "--json" in more else shown.stdout) == (0, "")
            assert shown.stderr.startswith("Note: Rank 0: read from 'mine/replicas/0000/0/output.log' in file://")
            assert shown.stderr.endswith(", which does not exist yet.\n")
            assert shown.stderr.count("\n") == 1
        brought = here.replicas("collect", run.url, "--timeout", 1, "--out", tmp_path / "out", "--json")
        (skipped,) = brought.json["skipped"]
        assert (skipped["log"], skipped["problem"].rpartition(", ")[2]) == ("output.log", "which does not exist yet")
        assert not list((tmp_path / "out").rglob("output.log"))
    run.cancel()


def test_a_file_that_cannot_be_read_is_named(
    bars: HereInstead, local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    assert launch(local, "bars:fail_once", 1, run_id="mine", rendezvous=tmp_path / "there").wait(60)
    log = state_home / "replicas" / "mine" / "replicas" / "0000" / "0" / "output.log"
    log.unlink()
    log.mkdir()  # unreadable also for root
    shown = bars.replicas("logs", "mine", "-r", 0)
    assert shown.stdout == "attempt 0 of rank 0\n"
    assert f"{log} cannot be read (Is a directory); read from 'mine/replicas/0000/0/output.log'" in shown.stderr
