"""The logs of a run: of which attempts, where each is read, and how they are followed."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Literal, TypeVar

from executors.attempt import Attempt
from executors.errors import CorruptObjectError
from executors.logs import last_of
from executors.logs.follower import Sight, begins, follow_logs
from executors.logs.gaps import completed
from executors.logs.readers import open_log
from executors.native import Log
from executors.protocol import Outcome, ServerlessExecutor
from executors.run.observer import Observer, unreadable

LOOK_S, FAR_LOOK_S = 1.0, 4.0  # between two looks at a run in a directory, and in a bucket
Which = int | Literal["all"] | None
"""An attempt, all of them, or the newest."""
Ranks = int | Sequence[int] | None
Note = Callable[[str], None]
MAX_THREADS = 16

T = TypeVar("T")


class RunLogs:
    """Reads the logs of a run's ranks.

    Args:
        which: the attempt to read of each rank.
        note: is given a line about each log that is not read where its replica writes to.
    """

    def __init__(self, observer: Observer, executor: ServerlessExecutor, which: Which, note: Note) -> None:
        self._observer = observer
        self._executor = executor
        self._which = which
        self._note = note

    def tails(self, ranks: Sequence[int], n_lines: int, *, is_one: bool) -> Iterator[str]:
        """Return the last lines of rank after rank. Several are read at the same time, and few kept."""
        self._observer.look(ranks)
        ranks = self._that_have_it(ranks)
        texts = zip(ranks, in_order(lambda rank: self._tails(rank, n_lines), ranks), strict=True)
        return (text if is_one else _led_by(rank, text) for rank, text in texts)

    def followed(self, ranks: Sequence[int], n_lines: int, *, is_one: bool) -> Iterator[str]:
        """Return these and all later lines, until the attempts that are asked for have ended."""
        self._observer.update()
        lines = self._follow(self._that_have_it(ranks), n_lines)
        return (line if is_one else f"[{rank}] {line}" for rank, line in lines)

    def _that_have_it(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return those of the ranks that have the attempt that is asked for.

        Raises:
            ValueError: there are some, and none has it.
        """
        if not isinstance(self._which, int) or not ranks:
            return ranks
        newest = {rank: self._observer.attempt(rank).number for rank in ranks}
        if found := [rank for rank in ranks if 0 <= self._which <= newest[rank]]:
            return found
        most = max(newest.values())
        raise ValueError(f"attempt must be {'0' if most == 0 else f'from 0 to {most}'}, or 'all', got {self._which}.")

    def _attempts(self, rank: int) -> list[Attempt]:
        """Return the attempts to read of a rank, oldest first."""
        if isinstance(self._which, int):
            return [self._observer.attempt(rank).at(self._which)]
        launched = self._observer.launched(rank)
        return launched if self._which == "all" else launched[-1:]

    def _tails(self, rank: int, n_lines: int) -> str:
        attempts = self._attempts(rank)
        texts = [self._tail(attempt, n_lines) for attempt in attempts]
        if self._which != "all":
            return texts[0]
        texts = [text if text.endswith("\n") or not text else f"{text}\n" for text in texts]
        return "".join(f"{begins(each.number)}{text}" for each, text in zip(attempts, texts, strict=True))

    def _tail(self, attempt: Attempt, n_lines: int) -> str:
        text, handle = "", self._observer.handle_at(attempt)
        if problem := self._observer.problem(attempt.rank):
            self._note(f"Rank {attempt.rank}: {problem.error}")
        if handle is not None:
            with contextlib.closing(open_log(self._executor, handle)) as opened:
                text = opened.tail(n_lines)
            if text and opened.note:
                self._note(f"Rank {attempt.rank}: {opened.note}")
            if text and not opened.may_lag:
                return text
        outcome = self._outcome(attempt)
        if outcome is None or n_lines <= 0:
            return text
        if text:
            return last_of(completed(text, outcome.output_tail), n_lines)
        if outcome.output_tail:
            key, who = attempt.key("outcome.json"), self._executor.backend_name
            self._note(f"Rank {attempt.rank}: {who} has no log of it. This was kept by its outcome, {key!r}.")
        return last_of(outcome.output_tail or outcome.error or "", n_lines)

    def _outcome(self, attempt: Attempt) -> Outcome | None:
        known = self._observer.outcome(attempt.rank)
        if known is not None and known.attempt == attempt.number:
            return known
        try:
            return attempt.outcome()
        except CorruptObjectError as error:
            return unreadable(attempt, error)

    def _follow(self, ranks: Sequence[int], n_lines: int) -> Iterator[tuple[int, str]]:
        if self._which == "all":
            for rank in ranks:
                *earlier, newest = self._attempts(rank)
                for attempt in earlier:
                    yield rank, begins(attempt.number)
                    yield from ((rank, f"{line}\n") for line in _lines(self._tail(attempt, n_lines)))
                yield rank, begins(newest.number)
        yield from follow_logs(self, ranks, n_lines, look_s=LOOK_S if self._observer.is_near else FAR_LOOK_S)

    # What a follower needs

    def look(self, ranks: Sequence[int]) -> dict[int, Sight]:
        """Return the newest attempt of each rank that has a log; where one attempt is asked for, that."""
        sights = {}
        for state in self._observer.look(ranks):
            newest = self._observer.launched(state.rank)[-1].number
            number = self._which if isinstance(self._which, int) else newest
            sights[state.rank] = Sight(number, state.is_over or number < newest)
        return sights

    def open(self, rank: int, attempt: int) -> Log | None:
        """Return the log of an attempt; None while it has none."""
        handle = self._observer.handle_at(self._observer.attempt(rank).at(attempt))
        if handle is None:
            return None
        opened = open_log(self._executor, handle)
        if opened.note:
            self._note(f"Rank {rank}: {opened.note}")
        return opened

    def kept(self, rank: int, attempt: int) -> str:
        """Return the end of what an attempt printed, as its outcome keeps it."""
        outcome = self._outcome(self._observer.attempt(rank).at(attempt))
        return outcome.output_tail if outcome else ""


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
