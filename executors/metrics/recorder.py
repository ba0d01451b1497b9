"""Records the measurements of one attempt into write-once segments of lines.

The training thread only appends to queues, and never waits for the store. A background thread calls `measure` and
`look` once a second, and writes the segments. No error of this thread ends the training. `rows` describes the lines.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from executors.errors import StoreError
from executors.metrics.rows import RESERVED
from executors.process import memory_in_use
from executors.store import Store
from executors.store.record_names import run_record_key
from executors.store.records import exists
from executors.store.url import is_near

SEGMENT_BYTES = 1 << 20
# The time between two segments, in a directory and in a bucket, where each segment costs a request.
NEAR_S, FAR_S = 5.0, 60.0
# The time between two segments, as a share of the attempt's age. It grows, because otherwise a day would give 17,000
# files per replica.
NEAR_SHARE = 0.01
RETRY_S = 5.0
WAITING_BYTES = 8 << 20
LINE_S = 1.0  # the shortest time between two lines of reported numbers, except after a round
# Reports that are always kept: the first has the anchor's loss, unless `report` is called after `diloco.step`.
AFTER_ROUND = 2
LINES_PER_DOUBLING = 20_000
USAGE_S = 30.0
GPU_S = 1.0  # the longest wait for the driver of the GPU at the end of an attempt


def segments_prefix(run_id: str, rank: int, attempt: int) -> str:
    """Return the beginning of the keys of an attempt's segments.

    Args:
        run_id: the run.
        rank: the rank.
        attempt: the number of the attempt.

    Example:
        segments_prefix("otter", 3, 0)  # "otter/metrics/0003/0/"
    """
    return f"{run_id}/metrics/{rank:04d}/{attempt}/"


class Recorder:
    """Collects the measurements of one attempt, and writes them.

    Args:
        began: the time of the attempt's claim, by `clock`.
        n_segments: the number of segments that another process of this attempt has written. Default 0.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        rank: int,
        attempt: int,
        *,
        began: float,
        n_segments: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._run = run_record_key(run_id)
        self._rank = rank
        self._prefix = segments_prefix(run_id, rank, attempt)
        self._began = began
        self._clock = clock
        self._is_near = is_near(store.url)
        self.on_line: Callable[[float, Mapping[str, Any]], None] | None = None
        """Is called with each kept line and its Unix time, in the thread of the recorder. The function must not
        wait.
        """
        self.on_warning: Callable[[str], None] = lambda text: None
        """Is called once with a sentence if measurements cannot be written. The function must not wait."""
        self.on_gpu: Callable[[float], None] = lambda use: None
        """Is called with each measured utilization of the GPU, from 0 to 1. The function must not wait."""
        # The two threads share these. Each access is a single atomic operation.
        self._made = deque[tuple[float, Mapping[str, Any]]]()
        self._reported = deque[tuple[float, Mapping[str, float]]]()
        self._merged = list[tuple[float, dict[str, float]]]()
        """At most one item: the numbers that were reported since the last line, and the time of the newest report."""
        self._n_after_round = 0
        """The number of next reports that get a line of their own, because a round has just ended."""
        self._line_s, self._line_at, self._n_lines = LINE_S, 0.0, 0
        self._used = began, time.process_time()
        """The time of the last measurement, and the processor time until then."""
        # Only `look` uses these, and its callers hold the lock of the heartbeat.
        self._lines = list[bytes]()
        self._n_bytes = self._left_out = 0
        self._n_segments = n_segments
        self._closed: bytes | None = None
        """A segment that must be written unchanged, because it may exist although the store reported an error."""
        self._close_at: float | None = None
        self._retry_at = 0.0
        self._is_deleted = self._has_complained = False

    # -- called by the training thread ---------------------------------------------------------------------------------

    def report(self, numbers: Mapping[str, float]) -> None:
        """Add reported numbers.

        The numbers get a line if a line is due, or if they are the first or second report after a round.
        """
        now = self._clock()
        try:
            _, merged = self._merged.pop()
            merged.update(numbers)
        except IndexError:
            merged = dict(numbers)
        if self._n_after_round:
            self._n_after_round -= 1
        elif now < self._line_at:
            self._merged.append((now, merged))
            return
        else:
            self._n_lines += 1
            if not self._n_lines % LINES_PER_DOUBLING:
                self._line_s *= 2
        self._line_at = now + self._line_s
        self._reported.append((now, merged))

    def round(self, ended: float, fields: Mapping[str, Any]) -> None:
        """Add the measurements of a round that ended at the time `ended`."""
        self._made.append((ended, fields))
        self._n_after_round = AFTER_ROUND

    def left(self, name: str, work: float) -> None:
        """Add the work of a DiLoCo that is in no round at its end."""
        self._made.append((self._clock(), {"left_with": work, "name": name}))

    # -- called by the background thread, and at the end by the thread that ends it ------------------------------------

    def measure(self, *, is_last: bool = False) -> None:
        """Measure the use of the CPU, the memory and the GPU if that is due.

        The driver of a GPU that failed may never answer. So the background thread holds no lock while it calls this
        method, and at the end of the attempt the driver has 1 s.
        """
        now, used = self._clock(), self._used
        if self._is_deleted or now - used[0] < (LINE_S if is_last else USAGE_S):
            return
        self._used = now, time.process_time()
        with contextlib.suppress(OSError):  # a sandbox without /proc
            cores = (self._used[1] - used[1]) / (now - used[0])
            usage = {"cpu": round(cores, 3), "rss": memory_in_use()}
            usage |= _gpu_usage_within(GPU_S) if is_last else _gpu_usage()
            self._made.append((now, usage))
            if "gpu_use" in usage:
                self.on_gpu(usage["gpu_use"])

    def look(self, *, is_last: bool = False) -> None:
        """Make lines of the new measurements, and write the segments that are due.

        At the end of the attempt, write everything.
        """
        if self._is_deleted:
            self._made.clear()
            self._reported.clear()
            return
        now = self._clock()
        self._take_up(now, is_last=is_last)
        while now >= self._retry_at or is_last:
            if self._closed is None:
                is_due = is_last or self._n_bytes >= SEGMENT_BYTES
                if not self._lines or not (is_due or (self._close_at is not None and now >= self._close_at)):
                    return
                self._close()
            if not self._write(is_last=is_last):
                return

    def _take_up(self, now: float, *, is_last: bool) -> None:
        if self._merged and (is_last or now >= self._line_at):
            with contextlib.suppress(IndexError):
                self._reported.append(self._merged.pop())
                self._line_at = now + self._line_s
        while self._reported:
            at, numbers = self._reported.popleft()
            self._keep(at, {f"{name}_" if name in RESERVED else name: value for name, value in numbers.items()})
        while self._made:
            self._keep(*self._made.popleft())
        if self._lines and self._close_at is None:
            near_s = min(FAR_S, max(NEAR_S, NEAR_SHARE * (now - self._began)))
            self._close_at = now + (near_s if self._is_near or not self._n_segments else FAR_S)
        while self._n_bytes > WAITING_BYTES:
            kept = self._lines[(len(self._lines) - 1) % 2 :: 2]  # every second line is kept, and always the last one
            self._left_out += len(self._lines) - len(kept)
            self._lines = kept
            self._n_bytes = sum(map(len, self._lines))

    def _keep(self, at: float, fields: Mapping[str, Any]) -> None:
        if self.on_line is not None:
            self.on_line(time.time() - (self._clock() - at), fields)
        line = (json.dumps({"t": round(at - self._began, 3), **fields}) + "\n").encode()
        self._lines.append(line)
        self._n_bytes += len(line)

    def _close(self) -> None:
        """Close a segment with the first waiting lines."""
        if self._left_out:
            self._keep(self._clock(), {"left_out": self._left_out})
            self._left_out = 0
        n_lines = size = 0
        while n_lines < len(self._lines) and size < SEGMENT_BYTES:
            size += len(self._lines[n_lines])
            n_lines += 1
        self._closed = b"".join(self._lines[:n_lines])
        del self._lines[:n_lines]
        self._n_bytes -= size
        self._close_at = None

    def _write(self, *, is_last: bool) -> bool:
        """Create the closed segment in the store. Return True if it exists now."""
        assert self._closed is not None
        try:
            # A write would create the folder of a deleted run again. At a bucket, each such check costs a request.
            if (self._is_near or is_last) and not exists(self._store, self._run):
                self._is_deleted = True
                self._lines.clear()
                return False
            self._store.put_if_absent(f"{self._prefix}{self._n_segments:06d}.jsonl", self._closed)
        except StoreError as error:
            self._retry_at = self._clock() + RETRY_S
            if not self._has_complained:
                self._has_complained = True
                text = f"rank {self._rank}: measurements wait in memory: {error}"
                self.on_warning(text)
                # The disk is full, or the user has closed stderr.
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(f"replicas: {text}\n")
            return False
        self._closed = None
        self._n_segments += 1
        return True


def _gpu_usage_within(limit_s: float) -> dict[str, Any]:
    """Like `_gpu_usage`, but empty if the driver does not answer within `limit_s` seconds."""
    if _cuda_in_use() is None:
        return {}  # a thread is not needed
    found, answer = dict[str, Any](), _thread.allocate_lock()
    answer.acquire()

    def ask() -> None:
        found.update(_gpu_usage())
        answer.release()

    with contextlib.suppress(RuntimeError):  # no more threads can be started
        _thread.start_new_thread(ask, ())
        if answer.acquire(timeout=limit_s):
            return found
    return {}


def _gpu_usage() -> dict[str, Any]:
    """Return the GPU memory of torch, and the use of its busiest GPU. Empty if torch is not loaded or uses no GPU.

    The current GPU of this thread is the first one, whichever GPU the training uses. So the GPUs with memory of this
    process are asked, and before there is any memory all visible ones.
    """
    used = dict[str, Any]()
    with contextlib.suppress(Exception):  # the driver may fail
        if (cuda := _cuda_in_use()) is not None:
            memory = [cuda.memory_reserved(device) for device in range(cuda.device_count())]
            used["gpu_mem"] = sum(memory)
            own = [device for device, n_bytes in enumerate(memory) if n_bytes] or range(len(memory))
            used["gpu_use"] = max(map(cuda.utilization, own)) / 100
    return used


def _cuda_in_use() -> Any | None:
    """Return `torch.cuda` if this process uses a GPU."""
    with contextlib.suppress(Exception):  # torch may not be loaded completely
        cuda = sys.modules["torch"].cuda
        return cuda if cuda.is_initialized() else None
    return None
