"""The reason of a failed command, found in the output of its processes."""

from __future__ import annotations

import pytest

from executors.worker.printed_error import before_report, place_in, printed_traceback, root_cause

CAUSE = """Traceback (most recent call last):
  File "/home/me/train.py", line 7, in <module>
    main()
  File "/home/me/train.py", line 4, in main
    raise ValueError("no luck")
ValueError: no luck"""
SIBLING = """Traceback (most recent call last):
  File "/home/me/train.py", line 5, in main
    dist.barrier()
RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:31234"""
OF_TORCHRUN = """E1127 14:24:00 6691 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6805)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-27_14:24:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 6892)
============================================================
"""


def with_prefix(rank: int, traceback: str) -> str:
    return "\n".join(f"[rank{rank}]: {line}" for line in traceback.splitlines())


def zipped(first: str, second: str) -> str:
    """Two texts whose lines alternate."""
    one, other = first.splitlines(), second.splitlines()
    longest = max(len(one), len(other))
    return "\n".join(line for i in range(longest) for lines in (one, other) for line in lines[i : i + 1])


@pytest.mark.parametrize(
    "printed",
    [
        f"step 1: loss 3\n{CAUSE}\n",
        f"{CAUSE}\n{SIBLING}\n",
        f"{SIBLING}\n{CAUSE}\nleft\n",
        f"{with_prefix(1, CAUSE)}\n[rank1]:[W1127] destroy_process_group() was not called\n",
        zipped(with_prefix(1, CAUSE), with_prefix(0, SIBLING)),
        zipped(CAUSE, with_prefix(0, SIBLING)),
        CAUSE.replace("    main()\n", "    main()\nstep 2: loss 2\nEpoch 1 of 3\n"),
        f"{CAUSE}\n\nTraceback (most recent call last):\n  File 'x'\nsubprocess.CalledProcessError: Command died\n",
    ],
)
def test_the_traceback_that_explains_a_failure_is_found_in_the_output_of_processes(printed: str) -> None:
    assert printed_traceback(printed) == CAUSE


def test_the_error_of_a_sibling_is_better_than_none() -> None:
    assert printed_traceback(SIBLING) == SIBLING


@pytest.mark.parametrize(
    "printed",
    ["", "no such file", "Traceback (most recent call last):", "Traceback (most recent call last):\n  File x\n"],
)
def test_an_output_without_a_whole_traceback_has_none(printed: str) -> None:
    assert printed_traceback(printed) is None


def test_the_report_of_torchrun_is_not_the_output_of_its_processes() -> None:
    assert before_report(f"{CAUSE}\n{OF_TORCHRUN}") == CAUSE
    assert before_report(CAUSE) == CAUSE


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("-9", "Its process with RANK 1 was ended by signal 9 (SIGKILL)."),
        ("-11", "Its process with RANK 1 was ended by signal 11 (SIGSEGV)."),
        ("-6", None),
        ("1", None),
    ],
)
def test_a_process_that_a_signal_ended_is_named_and_no_sibling(code: str, expected: str | None) -> None:
    assert root_cause(f"{SIBLING}\n{OF_TORCHRUN.format(code=code)}") == expected
    assert root_cause(SIBLING) is None


def test_the_place_of_an_error_is_the_innermost_line_of_the_user() -> None:
    trace = CAUSE.replace("ValueError", '  File "/x/site-packages/torch/nn.py", line 99, in call\nValueError')
    assert place_in(trace) == "train.py:4"
    assert place_in(trace.replace("/x/site-packages/torch/nn.py", "<string>")) == "train.py:4"
    assert place_in('Traceback (most recent call last):\n  File "<string>", line 9\nValueError: x') == "<string>:9"
    assert place_in("Traceback (most recent call last):\nValueError: no luck") is None
