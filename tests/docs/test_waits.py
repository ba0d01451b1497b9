"""The table of waits is the same in the code and in its ADR, and no other module has a wait of its own."""

from __future__ import annotations

import re
from pathlib import Path

from executors.patience import TABLE, OutageTolerance, name_span

ROOT = Path(__file__).parents[2]
ADR = next((ROOT / "ADRs").glob("*-one-patience.md"))
OWN_WAIT = re.compile(r"^(?:PATIENCE|OUTAGE|RETRY|STORE_LIMIT)\w*_S\b", re.MULTILINE)
OTHER_WAITS = {
    "executors/backends/jobs/service.py": "the longest wait for job services, which ask for their own pauses",
    "executors/metrics/recorder.py": "a pause between two writes of an object that is written again in any case",
    "executors/replica/warning_log.py": "a pause between two writes of an object that is written again in any case",
    "executors/shipping/checkout.py": "the patience with git",
}


def row_of(patience: OutageTolerance) -> str:
    refused = patience.seconds if patience.refused_seconds is None else patience.refused_seconds
    dead = refused if patience.dead_seconds is None else patience.dead_seconds
    spans = " | ".join(map(name_span, (patience.seconds, refused, dead)))
    return f"| {patience.process} | {patience.waits_for} | {spans} | {patience.reason} |"


def test_the_adr_has_every_wait_with_its_reason() -> None:
    rows = [line for line in ADR.read_text().splitlines() if line.startswith("| ")][1:]
    assert rows == [row_of(each) for each in TABLE]


def test_no_other_module_says_how_long_to_wait_for_a_store() -> None:
    files = [path for package in ("executors", "diloco") for path in sorted((ROOT / package).rglob("*.py"))]
    found = [str(path.relative_to(ROOT)) for path in files if OWN_WAIT.search(path.read_text())]
    assert found == sorted(OTHER_WAITS)


def test_a_process_that_loses_more_waits_longer() -> None:
    waits = {each.process: each.seconds for each in TABLE}
    replica = waits["a replica in a round, or in its first anchor"]
    assert replica == waits["a replica that has ended"] == waits["a replica before its entrypoint is called"]
    longer = [seconds for process, seconds in waits.items() if process.startswith("`")]
    assert min(longer) > replica
    assert waits["a supervisor on this machine"] > replica
