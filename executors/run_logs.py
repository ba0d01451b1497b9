"""The logs of a run: of which attempts, where each is read, and how they are followed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeVar

from executors.attempt import Attempt
from executors.logs import last_of
from executors.logs.follower import Sight, begins, follow_logs
from executors.logs.gaps import completed
from executors.logs.readers import open_log
from executors.protocol import Log, Outcome, ServerlessExecutor
from executors.store.url import directory_of

LOOK_S, FAR_LOOK_S = 1.0, 4.0  # between two looks at a run in a directory, and in a bucket
Which = int | Literal["all"] | None
"""An attempt, all of them, or the newest."""
Ranks = int | Sequence[int] | None
Note = Callable[[str], None]
MAX_THREADS = 16

log = logging.getLogger(__name__)
T = TypeVar("T")


class LoggedRun(Protocol):
    """What is needed of a `Run`."""

    @property
    def run_id(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def executor(self) -> ServerlessExecutor: ...
    def newest_attempt(self, rank: int) -> Attempt: ...
    def handle_at(self, attempt: Attempt) -> Any: ...
    def look(self, ranks: Sequence[int]) -> Mapping[int, Sight]: ...
    def outcome_of(self, attempt: Attempt) -> Outcome | None: ...


def check_rank(run: LoggedRun, rank: int) -> int:
    """Return a rank that the run has.

    Raises:
        ValueError: it has not.
    """
    if not 0 <= rank < run.world_size:
        raise ValueError(f"Run {run.run_id!r} has the ranks 0 to {run.world_size - 1}, got rank={rank}.")
    return rank


class RunLogs:
    """Reads the logs of a run's ranks.

    Args:
        which: the attempt to read of each rank.
        note: is given a line about each log that is not read where its replica writes to.
    """

    def __init__(self, run: LoggedRun, which: Which = None, note: Note = log.warning) -> None:
        self._run = run
        self._which = which
        self._note = note
        self._with_log: dict[Attempt, Attempt] = {}

    def pieces(self, rank: Ranks, n_lines: int, *, follow: bool = False) -> Iterator[str]:
        """Yield the last lines, rank after rank, or these and all later ones, line after line; see `Run.logs`."""
        is_one = isinstance(rank, int)
        chosen = range(self._run.world_size) if rank is None else [rank] if isinstance(rank, int) else rank
        ranks = self._that_have_it([check_rank(self._run, each) for each in chosen])
        if follow:
            return (line if is_one else f"[{r}] {line}" for r, line in self._follow(ranks, n_lines))
        # Several are read at the same time, and few kept.
        texts = zip(ranks, in_order(lambda each: self._tails(each, n_lines), ranks), strict=True)
        return (text if is_one else _led_by(r, text) for r, text in texts)

    def _that_have_it(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return those of the ranks that have the attempt that is asked for.

        Raises:
            ValueError: there are some, and none has it.
        """
        if not isinstance(self._which, int) or not ranks:
            return ranks
        newest = {rank: self._run.newest_attempt(rank).number for rank in ranks}
        if found := [rank for rank in ranks if 0 <= self._which <= newest[rank]]:
            return found
        most = max(newest.values())
        raise ValueError(f"attempt must be {'0' if most == 0 else f'from 0 to {most}'}, or 'all', got {self._which}.")

    def _tails(self, rank: int, n_lines: int) -> str:
        """Return the last lines of a rank; of each attempt, where all are asked for."""
        attempts = self._attempts(rank)
        texts = [self._tail(attempt, n_lines) for attempt in attempts]
        if self._which != "all":
            return "".join(texts)
        texts = [text if text.endswith("\n") or not text else f"{text}\n" for text in texts]
        return "".join(f"{begins(each.number)}{text}" for each, text in zip(attempts, texts, strict=True))

    def _attempts(self, rank: int) -> list[Attempt]:
        """Return the attempts to read of a rank, oldest first."""
        newest = self._run.newest_attempt(rank)
        if self._which is None:
            return [self._that_has_a_log(newest)]
        if self._which == "all":
            return [each for each in map(newest.at, range(newest.number + 1)) if self._that_has_a_log(each) == each]
        return [newest.at(self._which)]

    def _follow(self, ranks: Sequence[int], n_lines: int) -> Iterator[tuple[int, str]]:
        """Yield ranks and lines until the attempts that are asked for have ended."""
        if self._which == "all":
            for rank in ranks:
                *earlier, newest = self._attempts(rank)
                for attempt in earlier:
                    yield rank, begins(attempt.number)
                    yield from ((rank, f"{line}\n") for line in _lines(self._tail(attempt, n_lines)))
                yield rank, begins(newest.number)
        store = self._run.newest_attempt(ranks[0]).store if ranks else None
        look_s = LOOK_S if store is None or directory_of(store.url) else FAR_LOOK_S
        yield from follow_logs(self, ranks, n_lines, look_s=look_s)

    # What a follower needs

    def look(self, ranks: Sequence[int]) -> dict[int, Sight]:
        """Return the newest attempt of each rank that has a log; where one attempt is asked for, that."""
        sights = dict(self._run.look(ranks))
        for rank, (number, has_ended) in sights.items():
            newest = self._run.newest_attempt(rank).at(number)
            if isinstance(self._which, int):
                has_ended = has_ended if number == self._which else newest.at(self._which).outcome() is not None
                sights[rank] = Sight(self._which, has_ended)
            else:
                sights[rank] = Sight(self._that_has_a_log(newest).number, has_ended)
        return sights

    def open(self, rank: int, attempt: int) -> Log | None:
        """Return the log of an attempt; None while it has none."""
        handle = self._run.handle_at(self._run.newest_attempt(rank).at(attempt))
        if handle is None:
            return None
        opened = open_log(self._run.executor, handle)
        if opened.note:
            self._note(f"Rank {rank}: {opened.note}")
        return opened

    def kept(self, rank: int, attempt: int) -> str:
        """Return the end of what an attempt printed, as its outcome keeps it."""
        outcome = self._run.outcome_of(self._run.newest_attempt(rank).at(attempt))
        return outcome.output_tail if outcome else ""

    def _tail(self, attempt: Attempt, n_lines: int) -> str:
        handle = self._run.handle_at(attempt)
        text = ""
        if handle is not None:
            with contextlib.closing(open_log(self._run.executor, handle)) as opened:
                text = opened.tail(n_lines)
                if text and not opened.may_lag:
                    return text
            if text and opened.note:
                self._note(f"Rank {attempt.rank}: {opened.note}")
        if not text:
            self._run.look([attempt.rank])  # so that it is on record if it has ended
        outcome = self._run.outcome_of(attempt)
        if outcome is None or n_lines <= 0:
            return text
        if text:
            return last_of(completed(text, outcome.output_tail), n_lines)
        if outcome.output_tail:
            key = attempt.key("outcome.json")
            who = self._run.executor.backend_name
            self._note(f"Rank {attempt.rank}: {who} has no log of it. This was kept by its outcome, {key!r}.")
        return last_of(outcome.output_tail or outcome.error or "", n_lines)

    def _that_has_a_log(self, attempt: Attempt) -> Attempt:
        """Return the attempt, or the one before it whose job runs it: a second copy of a job has a claim alone."""
        if attempt not in self._with_log:
            has_own = attempt.number == 0 or attempt.has("handle.json") or attempt.has("intent.json")
            if not has_own and not attempt.has("started.json"):  # an interrupted launch has an outcome alone
                has_own = True
            self._with_log[attempt] = attempt if has_own else self._that_has_a_log(attempt.at(attempt.number - 1))
        return self._with_log[attempt]


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def _led_by(rank: int, text: str) -> str:
    """Return the lines of a text that are not empty, each led by its rank."""
    return "".join(f"[{rank}] {line}\n" for line in text.split("\n") if line)


def in_order(act: Callable[[int], T], ranks: Sequence[int]) -> Iterator[T]:
    """Yield what `act` returns for each rank; several are under way at the same time.

    In threads that nobody waits for: Ctrl-C ends at once.
    """
    waiting: deque[Future[T]] = deque()
    for rank in ranks:
        waiting.append(_started(act, rank))
        if len(waiting) >= MAX_THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _started(act: Callable[[int], T], rank: int) -> Future[T]:
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(act(rank))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            answer.set_exception(error)

    threading.Thread(target=run, name="replicas-logs", daemon=True).start()
    return answer
