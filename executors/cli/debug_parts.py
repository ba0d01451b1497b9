"""Reads the parts of a debug archive: records, logs, events, metrics, the page and versions of a run.

Any process may have written the objects of a run. So the number and the size of objects are limited, and a record that
cannot be parsed is kept as text.
"""

from __future__ import annotations

import contextlib
import getpass
import io
import json
import os
import platform
import re
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from executors.attempt import Beat, parse_handle
from executors.cli.debug_archive import MAX_SECRET, SLOW_PART_S, Lines, LogEnd, Page, Part
from executors.errors import CorruptObjectError, ReplicasError, StoreError
from executors.logs import tail_text
from executors.masking import Masker, masked, secrets_in
from executors.registry.run_index import NOTE, noted_at_launch
from executors.restarts.decision_log import Decision
from executors.shipping.workspace import SECRET_NAMES, WORKSPACE
from executors.store.parallel import within
from executors.store.protocol import Entry
from executors.store.record_names import HANDLE, HEARTBEAT, RUN_RECORD
from executors.store.records import MAX_DEPTH, MAX_RECORD_BYTES, get_at_most, is_deeper_than
from executors.store.run_key import KEYS, find_key
from executors.store.state_folder import state_path
from executors.store.url import remote_access
from executors.task.record import RunRecord, TaskRecord
from executors.view.run_view import RunView

LIST_S = 60.0
MAX_KEYS, MAX_RECORDS, MAX_LOGS, MAX_STACKS = 100_000, 5_000, 2_000, 500
LOG_BYTES = 1 << 20
MAX_METRICS_BYTES = 8 << 20
MAX_CODE_BYTES, MAX_CODE_FILES, MAX_SOURCE_BYTES = 64 << 20, 2_000, 1 << 20
MAX_DUMP_BYTES = 4 << 20
RECORDS = re.compile(r"(?!.*(?:/artifacts/|/task[^/]*/code)).*\.json", re.DOTALL)
LOG = re.compile(r"(\d{4,7})/(0|[1-9]\d{0,3})/output\.log")
STACKS = re.compile(r"(\d{4,7})/(0|[1-9]\d{0,3})/stacks/(0|[1-9]\d{0,3})\.txt")
LEFT_OUT = (
    "Values of secrets, of environment variables and of tokens are replaced by ***, and user names in paths, too.",
    "Weights, rounds, artifacts and the pickled callable are not in the archive. keys.txt lists them.",
)
WITHOUT_CODE = "The code of the user is not in the archive. --code adds its text files."
SOURCES_LEFT_OUT = "left out; --code adds them"


class RunParts:
    """The parts of the archive of one run.

    Args:
        view: the run. Its record may be missing or damaged.
        with_code: True to add the code of the user.
        problems: a list that receives a sentence for each part that cannot be read whole.

    Example:
        RunParts(view_of(attach("first-try")), False, []).parts()
    """

    def __init__(self, view: RunView, with_code: bool, problems: list[str]) -> None:
        self._view = view
        self._store = view.store
        self._run_id = view.run_id
        self._with_code = with_code
        self._problems = problems
        self._prefix = f"{view.run_id}/"
        self.entries: list[Entry] = []
        """The objects of the run, as far as they can be listed."""

    def find_objects(self) -> None:
        """List the objects of the run. A store that does not answer is a problem, and not the end."""
        found: list[Entry] = []

        def read() -> None:
            found.extend(islice(self._store.list(self._prefix), MAX_KEYS + 1))

        try:
            within(LIST_S, read, self._store.url)
        except ReplicasError as error:
            self._problems.append(f"keys.txt: {error}")
        self.entries = sorted(found[:MAX_KEYS], key=lambda entry: entry.key)
        if len(found) > MAX_KEYS:
            self._problems.append(f"keys.txt: the run has more than {MAX_KEYS:,} objects. The others are left out.")

    def record(self) -> RunRecord | None:
        """Return the record of the run. None: it is missing, damaged, or the store does not answer."""
        try:
            return within(LIST_S, lambda: self._view.record, self._store.url)
        except ReplicasError as error:
            self._problems.append(f"run.json: {error}")
            return None

    def parts(self) -> list[Part]:
        """Return the parts that are read from the store or made from its objects, in the order of the archive."""
        return [
            *self._records(),
            Part("settings.json", self._settings),
            Part("events.jsonl", self._events, limit_s=SLOW_PART_S),
            Part("status.json", self._status, limit_s=SLOW_PART_S),
            *self._logs(),
            *self._stacks(),
            Part("metrics.jsonl", self._metrics, self._metrics_bytes(), limit_s=SLOW_PART_S),
            Part("report.html", self._page, limit_s=SLOW_PART_S),
            Part("keys.txt", self._keys, 200 * len(self.entries), asks_store=False),
            *(self._code() if self._with_code else ()),
        ]

    def _names(self) -> Iterator[tuple[str, Entry]]:
        """Yield the objects of the run with their keys below the run."""
        for entry in self.entries:
            yield entry.key.removeprefix(self._prefix), entry

    def _records(self) -> Iterator[Part]:
        named = [(name, entry) for name, entry in self._names() if RECORDS.fullmatch(name) and name != NOTE]
        # The first records name the digests of the run, which later texts may repeat.
        named.sort(key=lambda each: (each[0] != RUN_RECORD, not each[0].startswith("task"), each[0]))
        if len(named) > MAX_RECORDS:
            self._problems.append(f"records: {len(named) - MAX_RECORDS:,} further records are left out")
        for name, entry in named[:MAX_RECORDS]:
            size = min(entry.size_bytes * 2, MAX_RECORD_BYTES)
            yield Part(f"records/{name}", self._reader(name, entry), size)

    def _reader(self, name: str, entry: Entry) -> Callable[[], Sequence[tuple[str, Any]]]:
        return lambda: [(f"records/{name}", self._record(name, entry))]

    def _record(self, name: str, entry: Entry) -> Any:
        """Return a record as JSON value, or as text if it is none."""
        cut = entry.size_bytes > MAX_RECORD_BYTES
        data = bytes(
            self._store.get(entry.key, size=MAX_RECORD_BYTES)
            if cut
            else get_at_most(self._store, entry.key, MAX_RECORD_BYTES)
        )
        if cut:
            self._problems.append(f"{name}: only its first {MAX_RECORD_BYTES >> 20} MiB of {entry.size_bytes:,} bytes")
        try:
            value = json.loads(data)
            if is_deeper_than(value, MAX_DEPTH):
                raise ValueError("it is nested too deeply")
        except (ValueError, RecursionError) as error:
            self._problems.append(f"{name}: is not JSON ({error}). The archive has it as text.")
            return data.decode(errors="replace")
        try:
            if (parse := _parser_of(name)) is not None:
                parse(data, entry.key, self._store.url)
        except CorruptObjectError as error:
            self._problems.append(f"{name}: {error}")
        if isinstance(value, dict) and name.endswith("/task.json") and value.get("sources"):
            value["sources"] = SOURCES_LEFT_OUT
        return value

    def _settings(self) -> Sequence[tuple[str, Any]]:
        from dataclasses import asdict

        from executors.settings.declaration import key_of
        from executors.settings.settings import OPTIONS

        record = self._view.record
        found = {}
        for name, value in asdict(record.settings).items():
            key = key_of(name, OPTIONS[name]) if name in OPTIONS else name
            found[key] = {"value": value, "origin": record.origins.get(key, "default")}
        rest = {key: {"origin": origin} for key, origin in record.origins.items() if key not in found}
        return [("settings.json", {**found, **rest})]

    def _events(self) -> Sequence[tuple[str, Any]]:
        from executors.view.run_events import events_of

        return [("events.jsonl", Lines([each.to_json() for each in events_of(self._view, note=self._problems.append)]))]

    def _status(self) -> Sequence[tuple[str, Any]]:
        return [("status.json", self._now().to_json())]

    def _now(self) -> Any:
        """Return the state of the run, from the store alone if the backend is gone."""
        try:
            return self._view.status()
        except (ReplicasError, ImportError) as error:
            self._problems.append(f"status.json: the backend was not asked: {error}")
            return self._view.recorded_status()

    def _logs(self) -> Iterator[Part]:
        prefix, kept = "replicas/", set[tuple[int, int]]()
        for name, entry in self._names():
            if (found := LOG.fullmatch(name.removeprefix(prefix))) is not None and len(kept) < MAX_LOGS:
                kept.add((int(found[1]), int(found[2])))
                log = f"logs/{found[1]}/{found[2]}.log"
                yield Part(log, self._log_reader(log, entry), min(entry.size_bytes, LOG_BYTES), limit_s=60.0)
        # The logs of local replicas are in this user's directory of runs, whatever the store of the run is.
        here = state_path() / self._run_id / "replicas"
        for path in sorted(here.glob("*/*/output.log"))[:MAX_LOGS]:
            found = LOG.fullmatch(path.relative_to(here).as_posix())
            if found is not None and (int(found[1]), int(found[2])) not in kept:
                kept.add((int(found[1]), int(found[2])))
                log = f"logs/{found[1]}/{found[2]}.log"
                yield Part(log, self._file_reader(log, path), LOG_BYTES, limit_s=60.0, asks_store=False)
        # Logs of services are elsewhere, and this machine may not be able to read them.
        launched = {
            (int(found[1]), int(found[2]))
            for name, _ in self._names()
            if (found := re.fullmatch(r"replicas/(\d{4,7})/(0|[1-9]\d{0,3})/handle(?:-\w+)?\.json", name)) is not None
        }
        for rank, number in sorted(launched - kept)[: MAX_LOGS - len(kept)]:
            log = f"logs/{rank:04d}/{number}.log"
            yield Part(log, self._service_log(log, rank, number), LOG_BYTES, limit_s=60.0, asks_store=False)

    def _log_reader(self, log: str, entry: Entry) -> Callable[[], Sequence[tuple[str, Any]]]:
        def read() -> Sequence[tuple[str, Any]]:
            # The log may have grown since it was listed, and never shrinks.
            start = max(0, entry.size_bytes - LOG_BYTES - MAX_SECRET)
            data = self._store.get(entry.key, start=start, size=entry.size_bytes - start)
            return [(log, LogEnd(bytes(data).decode(errors="replace"), LOG_BYTES, is_cut=start > 0))]

        return read

    def _file_reader(self, log: str, path: Path) -> Callable[[], Sequence[tuple[str, Any]]]:
        def read() -> Sequence[tuple[str, Any]]:
            text, size = tail_text(path, LOG_BYTES + MAX_SECRET), path.stat().st_size
            return [(log, LogEnd(text, LOG_BYTES, is_cut=size > LOG_BYTES + MAX_SECRET))]

        return read

    def _service_log(self, log: str, rank: int, number: int) -> Callable[[], Sequence[tuple[str, Any]]]:
        def read() -> Sequence[tuple[str, Any]]:
            reader = self._view.reader
            reader.records.update()
            handle = reader.handles.at(reader.records.attempt(rank).at(number))
            if handle is None:
                raise StoreError("its handle cannot be read, so this machine cannot find the log.")
            with contextlib.closing(self._view.placements.open_log(handle)) as opened:
                text = opened.tail(200_000)
            end = text[-LOG_BYTES - MAX_SECRET :]
            return [(log, LogEnd(end, LOG_BYTES, is_cut=len(end) < len(text)))]

        return read

    def _stacks(self) -> Iterator[Part]:
        found = [(name, entry) for name, entry in self._names() if STACKS.fullmatch(name.removeprefix("replicas/"))]
        for name, entry in found[-MAX_STACKS:]:
            path = "stacks/" + name.removeprefix("replicas/").replace("/stacks/", "-").replace("/", "-")
            yield Part(path, self._text_reader(path, entry), min(entry.size_bytes, MAX_DUMP_BYTES))

    def _text_reader(self, path: str, entry: Entry) -> Callable[[], Sequence[tuple[str, Any]]]:
        def read() -> Sequence[tuple[str, Any]]:
            data = self._store.get(entry.key, size=min(entry.size_bytes, MAX_DUMP_BYTES))
            return [(path, bytes(data).decode(errors="replace"))]

        return read

    def _metrics_bytes(self) -> int:
        # A row of the archive is up to twice as long as the line that it is read from.
        return min(
            2 * sum(each.size_bytes for name, each in self._names() if name.startswith("metrics/")), MAX_METRICS_BYTES
        )

    def _metrics(self) -> Sequence[tuple[str, Any]]:
        from executors.metrics.metrics import read_metrics

        metrics = read_metrics(self._store, self._run_id, self._view.record)
        self._problems += metrics.problems
        rows, size = list[Any](), 0
        for row in reversed(metrics.rows):
            rows.append({name: each for name, each in metrics.record(row).items() if name != "t" and each is not None})
            size += 20 * len(rows[-1])
            if size > MAX_METRICS_BYTES:
                self._problems.append(f"metrics.jsonl: has the last {len(rows):,} of {len(metrics):,} rows")
                break
        return [("metrics.jsonl", Lines(rows[::-1]))]

    def document(self) -> Any:
        """Return the document of the page. It is read from the store, and the backend is asked."""
        from executors.view.run_page import report_document

        return report_document(self._view)

    def _page(self) -> Sequence[tuple[str, Any]]:
        from executors.view.report.page import page

        return [("report.html", Page(self.document(), page))]

    def _keys(self) -> Sequence[tuple[str, Any]]:
        lines = [f"{entry.size_bytes:>12} {entry.modified_at:.0f} {name}\n" for name, entry in self._names()]
        return [("keys.txt", "".join(lines))]

    def _code(self) -> Iterator[Part]:
        for name, entry in self._names():
            if re.fullmatch(r"task[^/]{0,40}/code\.tar\.gz", name):
                yield Part("code/", self._package_reader(entry), min(entry.size_bytes * 8, MAX_CODE_BYTES), SLOW_PART_S)
            elif re.fullmatch(r"task[^/]{0,40}/task\.json", name):
                yield Part("code/sources/", self._sources_reader(entry))
        yield Part("code/entrypoint/", self._entrypoint, MAX_SOURCE_BYTES)

    def _package_reader(self, entry: Entry) -> Callable[[], Sequence[tuple[str, Any]]]:
        def read() -> Sequence[tuple[str, Any]]:
            data = bytes(get_at_most(self._store, entry.key, MAX_CODE_BYTES))
            return [*self._files_of(data)]

        return read

    def _files_of(self, data: bytes) -> Iterator[tuple[str, str]]:
        """Yield the text files of the user in a package. Other files cannot be masked, so they are left out."""
        from fnmatch import fnmatchcase

        size = 0
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|gz") as tar:
            for number, member in enumerate(tar):
                if number >= MAX_CODE_FILES or size > MAX_CODE_BYTES:
                    self._problems.append("code/: further files are left out")
                    return
                name = member.name
                if not member.isfile() or not name.startswith(f"{WORKSPACE}/"):
                    continue
                is_secret = any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in SECRET_NAMES)
                if member.size > MAX_SOURCE_BYTES or is_secret or (file := tar.extractfile(member)) is None:
                    self._problems.append(f"code/{name}: left out, because it is large or may hold a secret")
                    continue
                content = file.read(MAX_SOURCE_BYTES)
                size += len(content)
                try:
                    text = content.decode()
                except ValueError:
                    text = "\0"
                if "\0" in text:
                    self._problems.append(f"code/{name}: left out, because it is not text")
                    continue
                yield f"code/{name.removeprefix(f'{WORKSPACE}/')}", text

    def _sources_reader(self, entry: Entry) -> Callable[[], Sequence[tuple[str, Any]]]:
        def read() -> Sequence[tuple[str, Any]]:
            record = TaskRecord.parse(get_at_most(self._store, entry.key, MAX_CODE_BYTES), entry.key, self._store.url)
            sources = list(record.sources.items())[:MAX_CODE_FILES]
            return [(f"code/sources/{Path(str(name)).name}.txt", str(text)) for name, text in sources]

        return read

    def _entrypoint(self) -> Sequence[tuple[str, Any]]:
        """Return the file of the entrypoint, if this machine has launched the run from it."""
        record = self._view.record
        if noted_at_launch(self._run_id, self._store.url) is None:  # any process could have written the path
            return []
        name = record.entrypoint.partition(":")[0]
        path = Path(record.cwd, name if name.endswith(".py") else f"{name.replace('.', '/')}.py")
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > MAX_SOURCE_BYTES:
            return []
        return [(f"code/entrypoint/{path.name}", path.read_text(encoding="utf-8", errors="replace"))]


def _parser_of(name: str) -> Callable[[Any, str, str], Any] | None:
    """Return the function that parses a record. None: only its owner parses it."""
    last = name.rpartition("/")[2]
    parsers: Mapping[str, Callable[[Any, str, str], Any]] = {
        RUN_RECORD: RunRecord.parse,
        "task.json": TaskRecord.parse,
        HEARTBEAT: Beat.parse,
        HANDLE: parse_handle,
    }
    if name.startswith("decisions/"):
        return Decision.parse
    return parsers.get(last)


def machine_parts(backend: str) -> list[Part]:
    """Return the parts about this machine: versions, the checks of `doctor`, and the names of variables.

    Args:
        backend: the backend to check.

    Example:
        machine_parts("local")
    """
    from executors.cli.doctor import doctor_document

    def versions() -> Sequence[tuple[str, Any]]:
        packages = {}
        for each in metadata.distributions():
            with contextlib.suppress(Exception):  # a broken installation has no name
                packages[str(each.metadata["Name"])] = each.version
        about = {
            "python": sys.version,
            "system": platform.platform(),
            "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        }
        return [("versions.json", about)]

    def environment() -> Sequence[tuple[str, Any]]:
        return [("environment.json", dict(sorted(masked(os.environ).items())))]

    return [
        Part("versions.json", versions, 1 << 16, asks_store=False),
        Part(
            "doctor.json", lambda: [("doctor.json", doctor_document(backend))], 1 << 14, SLOW_PART_S, asks_store=False
        ),
        Part("environment.json", environment, 1 << 14, asks_store=False),
    ]


def masker_of(view: RunView, record: RunRecord | None, env: Mapping[str, str] | None = None) -> Masker:
    """Return the masker for a run, which knows the secrets that this machine has of it.

    Records have no values of secrets. So it knows the values of this process's environment, the keys of signed runs on
    this machine, and the credentials of the store.

    Args:
        view: the run.
        record: its record. None: it cannot be read.
        env: variables of the launch with their values, as the user gives them again. Default: none.

    Example:
        masker_of(view, view.record).text("…")
    """
    names = {name for place in record.placements for name in (*place.env, *place.secrets)} if record else set[str]()
    names |= {*record.settings.secrets} if record else set()
    values = [*secrets_in(os.environ, names), *secrets_in(env or {}, env or ())]
    with contextlib.suppress(ReplicasError, OSError, ValueError):
        values += [path.read_text()[:256].strip() for path in sorted((state_path() / KEYS).iterdir())[:1000]]
    if record is not None and record.key_id is not None:
        values.append(find_key(view.run_id, record.key_id) or "")
    with contextlib.suppress(Exception):  # the credentials may be missing or expired
        values += within(10.0, lambda: remote_access(view.store), view.store.url)[1].values()
    users = {Path.home().name} if os.environ.get("HOME") else set()
    with contextlib.suppress(KeyError, OSError, ImportError):
        users.add(getpass.getuser())
    if record is not None:
        users.add(record.created_by.partition("@")[0])
        users |= {found[1] for found in re.finditer(r"/(?:home|Users)/([^/\s]+)", record.cwd)}
    return Masker(values, users)
