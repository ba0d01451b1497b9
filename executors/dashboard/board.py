"""Knows the runs of a store, and looks at those that continue while a browser shows them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from executors.dashboard.changes import Versions
from executors.dashboard.pages import row_html
from executors.dashboard.run_feed import EVERY_S, RunFeed, RunRow
from executors.errors import ReplicasError, StoreError
from executors.patience import GLANCE
from executors.registry.run_index import known_run_ids, locate, noted_at
from executors.run.lookup import run_ids_in
from executors.store import Store
from executors.store.url import existing_store, impatient_store, is_near

ACTIVE_S = 10.0  # after the last request of a page, nothing is read for it; a page asks every two seconds
FIND_S, FIND_FAR_S = 3.0, 30.0  # between two searches for new runs, in a directory and in a bucket
SHARE, PAGE_SHARE = 0.015, 0.015
"""The shares of a processor core that looks at all runs may use, and their pages. More work makes longer pauses."""
N_AGAIN = 20
AGAIN_S, AGAIN_FAR_S = 60.0, 300.0
"""The newest runs that have ended are looked at again after this time, because another process may resume them."""
MAX_RUNS = 200  # runs in the list, the newest
KEPT_PAGES = 8  # pages of runs that are kept, although no tab shows them
LONGEST_PAUSE_S = 60.0  # between two looks at a run that continues, however many runs there are
N_THREADS = 4
LONGEST_WAIT_S = 1.0


class Board:
    """All runs that a dashboard shows.

    Threads look at the runs, only while a page asks. All tabs share one look at a run.

    Args:
        url: the store whose runs are shown. None: the runs that this machine knows, wherever they are.
        clock: returns seconds of a monotonic clock.

    Example:
        board = Board("s3://bucket/runs")
        board.start()
    """

    def __init__(self, url: str | Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self.versions = Versions()
        """The rows of the list, by the key of the run."""
        self.problem = ""
        """The reason why the runs cannot be listed."""
        self.n_older = 0
        """The number of runs that the list leaves out."""
        self._clock = clock
        self._feeds = dict[str, RunFeed]()
        self._stores = dict[str, Store]()
        self._ids = dict[tuple[str, str], str]()
        """The key of each known run, by the url of its store and its id."""
        self._list_until = 0.0
        self._page_until = dict[str, float]()
        """Until when pages of runs are wanted, by key. The page that was asked for last is the last one."""
        self._next_at = dict[str, float]()
        self._page_at = dict[str, float]()
        """The times of the next look at a run, and of the next page of it."""
        self._busy = set[str]()
        self._find_at = 0.0
        self._is_finding = False
        self._is_stopped = False
        self._work = threading.Condition()

    def start(self) -> None:
        """Start the threads that look at runs. They are daemons, and wait until a page asks."""
        for number in range(N_THREADS):
            threading.Thread(target=self._serve, name=f"replicas-dashboard-{number}", daemon=True).start()

    def stop(self) -> None:
        """Let the threads end."""
        with self._work:
            self._is_stopped = True
            self._work.notify_all()

    def want_list(self) -> None:
        """Note that a page shows the list now."""
        self._want(lambda until: setattr(self, "_list_until", until))

    def want_page(self, key: str) -> None:
        """Note that a page shows a run now.

        Args:
            key: the key of the run.
        """

        def note(until: float) -> None:
            is_new = key not in self._page_until
            self._page_until.pop(key, None)
            self._page_until[key] = until
            if is_new:
                self._next_at[key] = self._page_at[key] = 0.0

        self._want(note)

    def look_soon(self, key: str) -> None:
        """Look at a run again, also if it had ended, because something has been done to it.

        Args:
            key: the key of the run.
        """
        with self._work:
            self._next_at[key] = self._page_at[key] = 0.0
            self._work.notify_all()

    def find(self, key: str) -> RunFeed | None:
        """Return the feed of a run. None: the dashboard does not show that run.

        Args:
            key: the key of the run.
        """
        feed = self._feeds.get(key)
        if feed is None:
            self.find_runs()
            feed = self._feeds.get(key)
        return None if feed is None or feed.is_gone else feed

    def key_of(self, store_url: str, run_id: str) -> str | None:
        """Return the key of a run, by the url of its store and its id. None: it is not shown."""
        if (store_url, run_id) not in self._ids:
            self.find_runs()
        return self._ids.get((store_url, run_id))

    def find_runs(self) -> None:
        """Search the runs, and add those that are new. The reason of a failure is kept in `problem`."""
        try:
            found = list(self._search())
        except ReplicasError as error:
            self.problem = str(error)
            return
        self.problem = ""
        newest, self.n_older = found[-MAX_RUNS:], max(0, len(found) - MAX_RUNS)
        for url, run_id in newest:
            if (url, run_id) not in self._ids:
                with contextlib.suppress(ReplicasError):
                    feed = RunFeed(self._store(url), run_id)
                    self._feeds[feed.key] = feed
                    self._ids[url, run_id] = feed.key
        for gone in self._ids.keys() - {*newest}:
            self._feeds.pop(self._ids.pop(gone), None)
        self._show_list()

    def _want(self, note: Callable[[float], None]) -> None:
        with self._work:
            note(self._clock() + ACTIVE_S)
            self._work.notify_all()

    def _store(self, url: str) -> Store:
        if url not in self._stores:
            existing_store(url)  # an error about a missing directory or package comes from here
            self._stores[url] = impatient_store(url, GLANCE.limit_s)
        return self._stores[url]

    def _search(self) -> Iterable[tuple[str, str]]:
        """Return the url of the store and the id of each run, the oldest first as far as this machine knows."""
        if self.url is not None:
            store = existing_store(self.url)
            ids = [*run_ids_in(store)]
            known = {
                run_id: feed.row.created_at for (_, run_id), key in self._ids.items() if (feed := self._feeds[key])
            }
            order = {run_id: known.get(run_id) or noted_at(run_id) or time.time() for run_id in ids}
            return [(store.url, run_id) for run_id in sorted(ids, key=order.__getitem__)]
        urls = {run_id: url for url, run_id in self._ids}
        found = []
        for run_id in known_run_ids():
            with contextlib.suppress(StoreError):  # the folder of the run belongs to another user
                if (url := urls.get(run_id) or locate(run_id)) is not None:
                    found.append((url, run_id))
        return found

    # The threads

    def _serve(self) -> None:
        while not self._is_stopped:
            with self._work:
                key, is_find, wait_s = self._next()
                if key is None and not is_find:
                    self._work.wait(wait_s)
                    continue
                self._busy.add(key or "")
            try:
                if is_find:
                    self.find_runs()
                elif key is not None:
                    self._look(key)
            finally:
                with self._work:
                    self._busy.discard(key or "")
                    self._is_finding = self._is_finding and not is_find
                    self._work.notify()

    def _next(self) -> tuple[str | None, bool, float | None]:
        """Return the key of the run to look at, or True if runs must be searched, or the time to wait."""
        now = self._clock()
        pages = {key for key, until in self._page_until.items() if until > now}
        for key in [key for key, until in self._page_until.items() if until <= now]:
            del self._page_until[key]
        has_list = self._list_until > now
        if not has_list and not pages:
            self._forget_pages(pages)
            return None, False, None  # no page asks, so sleep until one does
        if has_list and not self._is_finding and now >= self._find_at:
            self._is_finding = True
            near = self.url is None or is_near(str(self.url))
            self._find_at = now + (FIND_S if near else FIND_FAR_S)
            return None, True, None
        feeds = [*self._feeds.items()]
        ended = [key for key, feed in feeds if not feed.goes_on and not feed.is_gone][-N_AGAIN:] if has_list else []
        again = pages | {*ended}
        wanted = [key for key, feed in feeds if (feed.goes_on and has_list) or (key in again and not feed.is_gone)]
        waits = {key: self._next_at.get(key, 0.0) for key in wanted if key not in self._busy}
        # A page comes before rows. The newest run comes first among rows that were never read.
        order = {key: (key not in pages, at, -place) for place, (key, at) in enumerate(waits.items()) if at <= now}
        if order:
            return min(order, key=order.__getitem__), False, None
        return None, False, min([LONGEST_WAIT_S, *(at - now for at in waits.values())])

    def _look(self, key: str) -> None:
        feed, now = self._feeds.get(key), self._clock()
        if feed is None:
            return
        is_page = key in self._page_until and now >= self._page_at.get(key, 0.0)
        feed.look(with_page=is_page)
        feeds = [*self._feeds.values()]
        rows_s = min(LONGEST_PAUSE_S, sum(each.cpu_s for each in feeds if each.goes_on) / SHARE)
        again_s = 0.0 if feed.goes_on else AGAIN_S if is_near(feed.store.url) else AGAIN_FAR_S
        with self._work:
            now = self._clock()
            self._next_at[key] = now + max(EVERY_S, feed.pause_s, rows_s, again_s)
            if is_page:
                pages_s = sum(self._feeds[each].page_cpu_s for each in self._page_until if each in self._feeds)
                self._page_at[key] = now + pages_s / PAGE_SHARE
        self._show_list()

    def _forget_pages(self, pages: Iterable[str]) -> None:
        shown = [key for key, feed in self._feeds.items() if feed.has_page and key not in pages]
        for key in shown[:-KEPT_PAGES]:
            self._feeds[key].document = None
        for feed in self._feeds.values():
            feed.forget_page()

    def _show_list(self) -> None:
        rows = [feed.row for feed in [*self._feeds.values()] if not feed.is_gone]
        rows.sort(key=_age_order)
        self.versions.add({row.key: row_html(row) for row in rows}, self._head())

    def _head(self) -> Mapping[str, str]:
        problem = f"The runs cannot be listed: {self.problem}" if self.problem else ""
        older = f"{self.n_older} older runs are not shown. See all with: replicas ls --last 0" if self.n_older else ""
        return {"problem": problem, "older": older}


def _age_order(row: RunRow) -> float:
    return -(row.created_at or time.time())


def check_listing(url: str | Path | None) -> None:
    """Check that a store exists and can be listed, before a server starts.

    Args:
        url: the store. None: the runs that this machine knows.

    Raises:
        RunNotFoundError: the directory does not exist.
        StoreError: the store does not answer, or refuses the access.
    """
    if url is None:
        return
    next(iter(run_ids_in(existing_store(url))), None)
