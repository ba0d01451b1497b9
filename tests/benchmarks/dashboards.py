"""A dashboard of 20 runs of 8 replicas: its processor time (D1), its requests to a bucket (D2), and a first paint (D3).

No replica runs. The benchmark writes what replicas would: heartbeats, and a segment of measurements of each replica
once a minute. The dashboard is a process of its own, and four pages ask it: the list twice, and one run's page twice.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from executors.store import Store, open_store
from executors.store.records import to_bytes

from .far import running_bucket
from .harness import Comparison, Options
from .launch import state_of_its_own

sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers of the tests

from support.hostile_records import local_handle
from support.made_up_runs import large
from support.new_runs import run_json

N_RUNS, N_REPLICAS = 20, 8
SEGMENT_S, BEAT_S = 60.0, 10.0  # between two segments, and two heartbeats, of a replica at a bucket
ELSEWHERE = "another-host 0-0 1"
CORE, REQUESTS, PAINT, WHOLE = "of a core", "requests", "first paint", "all charts"


def dashboards(options: Options) -> list[Comparison]:
    """D1 and D2, at a bucket and in a directory."""
    n_runs, seconds = (2, 6.0) if options.quick else (N_RUNS, options.seconds or 180.0)
    what = f"a dashboard of {n_runs} runs of {N_REPLICAS} replicas"
    found = []
    with state_of_its_own(), running_bucket() as bucket, tempfile.TemporaryDirectory() as folder:
        for place, url in (("a bucket", bucket.url("runs")), ("a directory", folder)):
            n_asked: Callable[[], int] = (lambda: len(bucket.requests())) if place == "a bucket" else (lambda: 0)
            cpu, requests = _watched(url, n_runs, seconds, n_asked)
            found.append(Comparison("D1", f"{what} in {place}: processor", "share", {CORE: [cpu]}, goals={CORE: 0.05}))
            if place == "a bucket":
                title = f"{what} in {place}: requests of a running run in a minute"
                found.append(Comparison("D2", title, "requests", {REQUESTS: [requests]}, goals={REQUESTS: 15}))
    return found


def first_paint(options: Options) -> list[Comparison]:
    """D3: the page of a run of 64 replicas that reported 10,000 times each, in a chromium."""
    n_rows, repetitions = (200 if options.quick else 10_000), options.repetitions(3)
    samples: dict[str, list[float]] = {PAINT: [], WHOLE: []}
    with state_of_its_own(), tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        _write_large(store, n_rows)
        for _ in range(repetitions):
            with _served(folder) as (_, address):
                for name, seconds in _opening(address).items():
                    samples[name].append(seconds)
    if not samples[PAINT]:
        return []
    title = f"the page of 64 replicas x {n_rows:,} rows, first opened in a dashboard"
    return [Comparison("D3", title, "s", samples, goals={PAINT: 2.0})]


def _watched(url: str, n_runs: int, seconds: float, n_asked: Callable[[], int]) -> tuple[float, float]:
    """Return the share of a core, and the requests of one run in a minute, without the requests of the writer."""
    store = open_store(url)
    runs = [f"busy-{number:02d}" for number in range(n_runs)]
    for run_id in runs:
        _write_run(store, run_id, N_REPLICAS)
    with _served(url) as (process, address), _pages(address, runs[0]):
        time.sleep(min(30.0, seconds / 3))  # the first reads
        before, asked, began = _cpu_s(process.pid), n_asked(), time.monotonic()
        n_written = _keep_writing(store, runs, seconds)
        passed_s = time.monotonic() - began
        n_requests = n_asked() - asked - n_written
        return (_cpu_s(process.pid) - before) / passed_s, n_requests * 60 / passed_s / n_runs


def _write_run(store: Store, run_id: str, n: int, **more: Any) -> None:
    store.put(f"{run_id}/run.json", to_bytes(run_json(world_size=n, **more)))
    for rank in range(n):
        handle = local_handle(rank, run_id=run_id, store_url=store.url, machine=ELSEWHERE)
        store.put(f"{run_id}/replicas/{rank:04d}/0/handle.json", to_bytes(handle))
        store.put(f"{run_id}/replicas/{rank:04d}/0/started.json", to_bytes({"nonce": f"{rank}", "at": time.time()}))
        _beat(store, run_id, rank, 1)


def _beat(store: Store, run_id: str, rank: int, step: int) -> None:
    beat = {"at": time.time(), "step": step, "total_steps": 1e6, "loss": 3.0 + 1.0 / step}
    store.put(f"{run_id}/replicas/{rank:04d}/0/heartbeat.json", to_bytes(beat))


def _keep_writing(store: Store, runs: list[str], seconds: float) -> int:
    """Write as the replicas of runs do. Return the number of writes."""
    slots = [(run_id, rank) for rank in range(N_REPLICAS) for run_id in runs]
    began, n_beats, n_segments, n = time.monotonic(), 0, 0, 0
    while (now_s := time.monotonic() - began) < seconds:
        while n_beats < now_s / BEAT_S * len(slots):
            _beat(store, *slots[n_beats % len(slots)], step=2 + n_beats)
            n_beats, n = n_beats + 1, n + 1
        while n_segments < now_s / SEGMENT_S * len(slots):
            number, place = divmod(n_segments, len(slots))
            run_id, rank = slots[place]
            first = 60 * number
            lines = [{"t": first + s, "step": 10 * (first + s), "loss": 3.0 + 1 / (1 + s)} for s in range(60)]
            text = "\n".join(map(json.dumps, lines))
            store.put(f"{run_id}/metrics/{rank:04d}/0/{number:06d}.jsonl", text.encode())
            n_segments, n = n_segments + 1, n + 1
        time.sleep(0.05)
    return n


def _write_large(store: Store, n_rows: int) -> None:
    subject = large(n_rows)
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in subject.metrics.rows:
        values = asdict(row)
        line = {"t": row.t, **values["values"]} if "values" in values else values
        by_rank.setdefault(row.rank, []).append({k: v for k, v in line.items() if k not in ("rank", "attempt")})
    _write_run(store, "large", len(by_rank))
    for rank, lines in by_rank.items():
        for number, first in enumerate(range(0, len(lines), 2000)):
            text = "\n".join(map(json.dumps, lines[first : first + 2000]))
            store.put(f"large/metrics/{rank:04d}/0/{number:06d}.jsonl", text.encode())


@contextlib.contextmanager
def _served(url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve a store in another process, and yield the process and the address with its token."""
    command = [sys.executable, "-m", "executors.cli", "dashboard", "--port", "0", "--json", "--store", url]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while lines[-1:] != ["}\n"]:
                lines.append(process.stdout.readline())
                if not lines[-1]:
                    raise RuntimeError(f"the dashboard ended with {process.wait()}")
            yield process, json.loads("".join(lines))["url"]
        finally:
            process.terminate()


@contextlib.contextmanager
def _pages(address: str, run_id: str) -> Iterator[None]:
    """Ask a dashboard as four open tabs do."""
    parts, is_over = urlsplit(address), threading.Event()
    host = parts.netloc
    cookie = ""

    def ask(path: str) -> tuple[Any, bytes]:
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("GET", path, headers={"Cookie": cookie})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    entry, _ = ask(f"/?{parts.query}")
    cookie = entry.getheader("set-cookie", "").partition(";")[0]
    keys: list[str] = []
    while not keys:
        listed = json.loads(ask("/changes?since=0")[1])
        keys = [key for key in listed.get("order", ()) if key.endswith(f"/{run_id}")]
        time.sleep(0.1)

    def keep_asking(path: str) -> None:
        version = 0
        while not is_over.wait(2.0):
            version = json.loads(ask(f"{path}?since={version}")[1])["version"]

    paths = ["/changes", "/changes", f"/runs/{keys[0]}/changes", f"/runs/{keys[0]}/changes"]
    tabs = [threading.Thread(target=keep_asking, args=(path,)) for path in paths]
    for tab in tabs:
        tab.start()
    try:
        yield
    finally:
        is_over.set()
        for tab in tabs:
            tab.join()


def _opening(address: str) -> dict[str, float]:
    """Return the seconds until the browser has painted the page of the run, and until all its charts are drawn."""
    import shutil

    chromium = shutil.which("chromium")
    if chromium is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.goto(address)
        tab.wait_for_selector("tbody.rows a")
        began = time.perf_counter()
        tab.locator("tbody.rows a").first.click()
        tab.wait_for_selector("main[data-drawn] h1", state="attached")
        painted = time.perf_counter() - began
        tab.wait_for_selector("figure.curves canvas", state="attached", timeout=120_000)
        found = {PAINT: painted, WHOLE: time.perf_counter() - began}
        browser.close()
        return found


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
