"""Invents runs for tests of pages: calm, with kills and a resume, large, failed at once, without DiLoCo, and hostile.

Their rows come from a small model of training, and look as if replicas had written them. Times are invented, too.

    python -m support.made_up_runs DIR      (with `tests` in PYTHONPATH) writes the page of each
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from executors.metrics.metrics import AttemptSpan, Metrics
from executors.metrics.rows import Numbers, Round, Row, Verdict
from executors.protocol import Outcome, ReplicaStatus
from executors.status import DecisionDocument, ReplicaState, RunStatus
from executors.task.record import RunRecord, TaskRecord
from executors.view.report.document import Subject
from executors.view.report.event_reader import Event, events_of_end
from support.new_runs import run_json

BEGAN_AT = 1_790_000_000.0
STEP_S = 0.1
ELEMENTS = 750_000
PAYLOAD = 3_000_000  # bytes of a round in fp32
HOSTILE = (
    "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>\x1b[31m\x1b]0;title\x07\u202e"
)
"""A text that a record of a run may have, and that a page or a terminal must escape."""
TRACEBACK = """Traceback (most recent call last):
  File "/home/me/project/train.py", line 41, in main
    batch = next(batches)
  File "/home/me/project/data.py", line 12, in batches
    raise ValueError(f"no shard {name!r}")
ValueError: no shard 'corpus-0003'
"""


@dataclass
class Scene:
    """The description of an invented run: `rounds` rounds of `inner` steps by `n` replicas."""

    n: int = 4
    rounds: int = 60
    inner: int = 10
    slow: Mapping[int, float] = field(default_factory=dict)
    """For slow ranks, the factor by which a step takes longer."""
    killed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For each rank, the rounds in which it is killed. It is resumed two rounds later, except after the third kill."""
    more: Callable[[float], dict[str, float]] = lambda step: {}
    """Returns the numbers that are reported at a step in addition to step and loss."""
    every: int = 1
    """The number of steps between two reports."""
    overlap: int = 0
    """The number of steps that are made during a round, with contributions in int8. 0: training waits for rounds."""


def made_up(scene: Scene, run_id: str = "made-up-run", seed: int = 0, **record: Any) -> Subject:
    """Invent a run."""
    rng = random.Random(seed)
    rows: list[Row] = []
    spans: list[AttemptSpan] = []
    origins: dict[tuple[int, int], float] = {}
    began: dict[int, float] = {}
    attempt = dict.fromkeys(range(scene.n), 0)
    dead: dict[int, int] = {}
    for rank in range(scene.n):
        origins[rank, 0] = began[rank] = 0.4 * rng.random()
    now_s = 2.5
    for entry in range(scene.rounds):
        for rank, until in list(dead.items()):
            if entry >= until:
                attempt[rank] += 1
                origins[rank, attempt[rank]] = began[rank] = now_s
                del dead[rank]
        alive = [rank for rank in range(scene.n) if rank not in dead]
        dying = [rank for rank in alive if entry in scene.killed.get(rank, ())]
        arrivals = {}
        for rank in alive:
            step_s = STEP_S * scene.slow.get(rank, 1.0) * rng.uniform(0.9, 1.1)
            starts_s = max(now_s, began[rank] + 1.5)
            n_steps = scene.inner if rank not in dying else scene.inner // 2
            for number in range(n_steps):
                step = entry * scene.inner + number + 1
                if step % scene.every == 0:
                    loss = 1.6 + 4.2 * math.exp(-3 * step / (scene.rounds * scene.inner)) + rng.gauss(0, 0.12)
                    at_s = starts_s + (number + 1) * step_s - origins[rank, attempt[rank]]
                    values = {"step": float(step), "loss": loss, **scene.more(step)}
                    rows.append(Numbers(rank=rank, attempt=attempt[rank], t=max(0.0, at_s), values=values))
            arrivals[rank] = (starts_s + scene.inner * step_s, scene.inner * step_s)
        for rank in dying:
            ended_s = now_s + 0.5 * scene.inner * STEP_S
            error = f"Replica {rank} of {scene.n} was ended by signal 9 (SIGKILL)."
            outcome = Outcome(
                rank, attempt[rank], ReplicaStatus.FAILED, "signal", -9, signal="SIGKILL", error=error,
                finished_at=BEGAN_AT + ended_s, output_tail="step 120 loss 3.1\nstep 130 loss 3.0\n",
            )  # fmt: skip
            spans.append(_span(rank, attempt[rank], began[rank], ended_s, outcome))
            dead[rank] = entry + 3 if attempt[rank] < 2 else scene.rounds
            del arrivals[rank]
        moving_s, reduce_s, step_s = (rng.uniform(0.8, 1.2) * each for each in (0.05, 0.01, 0.004))
        grace_s = 3.0 if dying else 0.0
        in_time = min(arrival for arrival, _ in arrivals.values()) + 2.2
        counted = tuple(rank for rank, (arrival, _) in arrivals.items() if arrival <= in_time)
        sealed_s = max(arrivals[rank][0] for rank in counted) + moving_s / 2 + grace_s
        for rank, (arrived_s, train_s) in arrivals.items():
            wait_s = max(0.02, sealed_s - arrived_s - moving_s / 2)
            over_s = max(sealed_s, arrived_s) + moving_s / 2 + reduce_s + step_s
            verdict: Verdict = "counted" if rank in counted else "carried"
            norm = (
                (2.5 if rank in scene.slow and entry % 17 == 16 else 1.0)
                * rng.uniform(0.9, 1.1)
                * (2 - entry / scene.rounds)
            )
            hidden_s, late_s = scene.overlap * train_s / scene.inner, wait_s + moving_s + reduce_s + step_s
            beside: dict[str, Any] = {
                "late_s": late_s, "busy_s": late_s + hidden_s, "stale_steps": scene.overlap, "wire": "int8",
                "mean_wire": "int8", "wire_error": 0.008 + 0.0001 * (entry % 9),
            }  # fmt: skip
            rows.append(
                Round(
                    rank=rank, attempt=attempt[rank], t=over_s - origins[rank, attempt[rank]], entry=entry, fragment=0,
                    ranks=counted, verdict=verdict, weight=float(scene.inner), up=PAYLOAD + rng.randrange(200),
                    down=PAYLOAD, train_s=train_s, wait_s=wait_s, move_s=moving_s + hidden_s,
                    reduce_s=reduce_s, step_s=step_s, norm=norm, mean_norm=0.7 * (2 - entry / scene.rounds),
                    elements=ELEMENTS, **(beside if scene.overlap else {}),
                )
            )  # fmt: skip
        now_s = max(sealed_s, *(arrived for arrived, _ in arrivals.values())) + moving_s / 2 + reduce_s + step_s
    for rank in range(scene.n):
        if rank not in dead:
            outcome = Outcome(rank, attempt[rank], ReplicaStatus.SUCCEEDED, finished_at=BEGAN_AT + now_s + 0.3)
            spans.append(_span(rank, attempt[rank], began[rank], now_s + 0.3, outcome))
    spans.sort(key=lambda span: (span.rank, span.attempt))
    rows.sort(key=lambda row: (row.rank, row.attempt, row.t))
    return subject(run_id, scene.n, spans, rows, origins, **record)


def _span(rank: int, attempt: int, started_s: float, ended_s: float, outcome: Outcome) -> AttemptSpan:
    return AttemptSpan(rank=rank, attempt=attempt, started_s=started_s, ended_s=ended_s, outcome=outcome)


def subject(
    run_id: str,
    n: int,
    spans: list[AttemptSpan],
    rows: list[Row],
    origins: dict[tuple[int, int], float],
    *,
    problems: tuple[str, ...] = (),
    task: Mapping[str, Any] | None = None,
    url: str = "",
    pages: tuple[str | None, ...] = (),
    warned: Mapping[int, str] = MappingProxyType({}),
    **record: Any,
) -> Subject:
    newest = {span.rank: span for span in spans}
    states = [
        ReplicaState(
            rank, span.attempt, ReplicaStatus.RUNNING if span.outcome is None else span.outcome.status, span.outcome
        )
        if (span := newest.get(rank)) is not None
        else ReplicaState(rank, 0, ReplicaStatus.PENDING)
        for rank in range(n)
    ]
    events = [Event(kind="launched", at=BEGAN_AT - 2.0, actor="me@host:4711", why=f"{n} on local")]
    for span in spans:
        at = BEGAN_AT + span.started_s
        if span.attempt:
            why = f"restarting rank {span.rank} as attempt {span.attempt} (1 of 3): signal, SIGKILL"
            events.append(Event(kind="decided", at=at - 0.2, rank=span.rank, attempt=span.attempt - 1, why=why))
        events.append(Event(kind="claimed", at=at, rank=span.rank, attempt=span.attempt))
        if span.outcome is not None:
            events += events_of_end(span.outcome, at)
            if span.outcome.status is ReplicaStatus.FAILED and span.rank == 1:
                event = Event(kind="hang_suspected", at=span.outcome.finished_at - 6, rank=1, attempt=span.attempt)
                events.append(replace(event, why=f"the GIL is held by a call: {span.outcome.error}"))
    end_s = max([0.0, *(span.ended_s or 0.0 for span in spans)])
    for rank, text in warned.items():
        events.append(Event(kind="warning", at=BEGAN_AT + 0.9 * end_s, rank=rank, attempt=0, why=text, count=2))
    metrics = Metrics(
        run_id=run_id, world_size=n, began_at=BEGAN_AT, as_of_s=end_s, attempts=spans, rows=rows, problems=problems,
        origins=origins,
    )  # fmt: skip
    written = {
        "n": n, "created_at": BEGAN_AT - 2.0, "created_by": "me@host:4711", "cwd": "/home/me/project",
        "python": "3.11.7", "code": {"commit": "3f2a9c1d5b7e8f90" * 2, "dirty": True},
    }  # fmt: skip
    about = {"python": "3.11", "entrypoint": "train.py:main", "args": {"steps": 600, "lr": 3e-4}, "torch": "2.13.0"}
    return Subject(
        url=url or f"file:///home/me/runs/{run_id}",
        record=RunRecord.parse(run_json(**{**written, **record})),
        task=TaskRecord.parse({**about, **(task or {})}),
        now=RunStatus(run_id, "local", states, at=BEGAN_AT + end_s + 60),
        metrics=metrics,
        events=sorted(events, key=lambda event: event.at),
        pages=pages,
    )


def calm() -> Subject:
    """Four equal replicas without any incident."""
    return made_up(
        Scene(more=lambda step: {"lr": 3e-4 * min(1, step / 100), "eval_loss": 5 / (1 + step / 200)}), "calm-otter-7f3a"
    )


def with_kills() -> Subject:
    """Rank 1 is killed twice and resumed, and rank 3 is slow."""
    return made_up(
        Scene(rounds=80, slow={3: 1.25}, killed={1: (20, 50)}),
        "proud-tern-78ae",
        chaos=["kill:rank=1,round=20"],
        gpu="H100",
        warned=dict.fromkeys((0, 2), "5 steps of this replica since its last round are in no average."),
    )


def beside() -> Subject:
    """A run in which training continues during rounds for half of the time, and rank 2 is a little slow."""
    return made_up(Scene(rounds=40, overlap=5, slow={2: 1.05}), "swift-heron-51de")


def large(n_rows: int = 2000) -> Subject:
    """64 replicas, each with `n_rows` reports. Rank 17 is slow, and rank 40 dies and never comes back."""
    scene = Scene(n=64, rounds=n_rows // 50, inner=50, slow={17: 1.2}, killed={40: (60 * n_rows // 10_000,)})
    return made_up(scene, "vast-heron-90c1")


def failed_at_once() -> Subject:
    """All replicas raise before their first step."""
    spans = [
        _span(rank, 0, 0.1 * rank, 3.0 + 0.1 * rank, Outcome(
            rank, 0, ReplicaStatus.FAILED, "exception", 1, error=TRACEBACK, error_line=TRACEBACK.splitlines()[-1],
            error_place="data.py:12", finished_at=BEGAN_AT + 3.0, output_tail="loading the corpus …\nlast words\n",
        ))
        for rank in range(4)
    ]  # fmt: skip
    return subject("sad-crane-11d0", 4, spans, [], {(rank, 0): 0.1 * rank for rank in range(4)})


def without_diloco() -> Subject:
    """Two replicas without rounds and without steps in their reports. One of them still runs."""
    rows: list[Row] = [
        Numbers(rank=rank, attempt=0, t=2.0 + at, values={"accuracy": 1 - math.exp(-at / 50), "tokens": 1e6 * at})
        for rank in range(2)
        for at in range(200)
    ]
    outcome = Outcome(0, 0, ReplicaStatus.SUCCEEDED, finished_at=BEGAN_AT + 202)
    live = AttemptSpan(rank=1, attempt=0, started_s=0.3, ended_s=None, outcome=None)
    return subject("lone-wren-2b2b", 2, [_span(0, 0, 0.0, 202.0, outcome), live], rows, {(0, 0): 0.0, (1, 0): 0.3})


def hostile() -> Subject:
    """A run whose texts all try to run code in the page, to end their element, or to fill the page."""
    long = HOSTILE + "A" * (2 << 20)
    outcome = Outcome(
        0, 0, ReplicaStatus.FAILED, "exception", 1, error=f"{long}\n{HOSTILE}: {long}", error_line=long,
        error_place=HOSTILE, host=HOSTILE, finished_at=BEGAN_AT + 9, output_tail=f"{long}\n" * 3 + "50 %\r100 %\r\n",
    )  # fmt: skip
    rows: list[Row] = [
        Numbers(
            rank=0,
            attempt=0,
            t=float(at),
            values={"step": at, "loss": 1.0 / (1 + at), HOSTILE[:190]: at, "__proto__": 1, "vast": 10**299},
        )
        for at in range(1, 9)
    ]
    return subject(
        "odd-magpie-0bad", 1, [_span(0, 0, 0.0, 9.0, outcome)], rows, {(0, 0): 0.0}, problems=(long,),
        entrypoint=HOSTILE, created_by=HOSTILE, cwd=HOSTILE, python="3.11", chaos=[HOSTILE], env=[HOSTILE],
        code={"commit": HOSTILE, "dirty": HOSTILE}, executor_options={HOSTILE: long}, url=f"file:///{HOSTILE}",
        task={"args": {HOSTILE: long, "nested": [[HOSTILE]] * 50}, "requirements": [HOSTILE]},
        pages=('https://jobs.example/"onmouseover="window.pwned=3',),
        warned={rank: f"{HOSTILE}{rank}{'A' * 900}" for rank in range(500)},
    )  # fmt: skip


SCENES = {
    "calm": calm, "kills": with_kills, "large": large, "failed": failed_at_once, "lone": without_diloco,
    "beside": beside, "hostile": hostile,
}  # fmt: skip

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from executors.view.report.document import document
    from executors.view.report.page import page

    for name, make in SCENES.items():
        Path(sys.argv[1], f"{name}.html").write_text(page(document(make())))


def decision_of(kind: str) -> DecisionDocument:
    """Return a decision of a kind on the end of an attempt."""
    return {
        "kind": kind,
        "why": "",
        "reason": "signal",
        "words": "",
        "start": {},
        "charged": False,
        "strikes": 0,
        "not_before": 0.0,
        "at": 0.0,
        "by": "",
    }
