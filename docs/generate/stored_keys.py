"""Makes the page of stored keys. The keys come from the functions and constants that the code itself uses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from diloco.rendezvous.keys import Keys
from docs.generate.api import definition_of
from docs.generate.markdown import code, table
from executors.attempt import SIGNED, replica_key, spare_key, warning_record
from executors.restarts.lease import STARTS
from executors.settings.rule_finding import BROKEN, UNJUDGED, rule_record_name
from executors.settings.run_spec import ATTACHED_LEASE
from executors.store import record_names
from executors.store.added_ranks import added_key
from executors.task.notice_record import notices_prefix
from executors.worker import log_copy

NAMES = "executors.store.record_names"
OF_RUN = ("RUN_RECORD", "REMOVAL")
"""The constants of `record_names` that name a record of a run. Each other constant names a record of an attempt."""
WITHOUT_NAME = ("BEGINNINGS",)
"""The constants of `record_names` that list other constants."""
OF_RUN_KEYS = ("claim", "plain_claim", "outcome", "added", "abort")
"""The methods of `Keys` whose keys are not in the folder of a DiLoCo. Other sections of the page have them."""


class StoredKey(NamedTuple):
    """A key of an object in the store of a run, and the meaning of the object."""

    pattern: str
    """The key. Names in angle brackets stand for values, such as `<rank>`."""
    meaning: str

    @property
    def expression(self) -> re.Pattern[str]:
        """A regular expression that accepts the keys of the pattern."""
        parts = re.split(r"(<[a-z]+>)", self.pattern)
        return re.compile("".join(_VALUES.get(each, re.escape(each)) for each in parts))


_NUMBER = r"\d+"
_VALUES = {
    "<run>": "[^/]+", "<rank>": r"\d+(?:\.\d+)?", "<attempt>": _NUMBER, "<number>": _NUMBER, "<index>": _NUMBER,
    "<entry>": _NUMBER, "<shard>": _NUMBER, "<part>": _NUMBER, "<position>": _NUMBER, "<nonce>": "[0-9a-f]+",
    "<digest>": "[0-9a-f]+", "<digits>": "[0-9a-f]{16}", "<name>": "[^/]+", "<path>": ".+",
}  # fmt: skip


class _Blank(int):
    """A number that a key shows as a name in angle brackets, also where the key asks for four digits."""

    name: str

    @classmethod
    def of(cls, name: str) -> _Blank:
        made = cls(1)
        made.name = f"<{name}>"
        return made

    def __format__(self, spec: str) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name


RANK, ATTEMPT, NUMBER = _Blank.of("rank"), _Blank.of("attempt"), _Blank.of("number")


def keys_of_run() -> list[StoredKey]:
    """Return the keys of a run that belong to no attempt and to no DiLoCo."""
    named = [StoredKey(f"<run>/{getattr(record_names, name)}", _meaning(f"{NAMES}.{name}")) for name in OF_RUN]
    return [
        *named,
        StoredKey(Keys("<run>", "<name>").abort(), _meaning("diloco.rendezvous.keys.Keys.abort")),
        StoredKey("<run>/task/task.json", "The entrypoint, its arguments and the environment of the launch."),
        StoredKey("<run>/task/callable.pkl", "The callable, if the launch got a function instead of a name."),
        StoredKey("<run>/task/code.tar.gz", "The code, for replicas on other machines."),
        StoredKey("<run>/task-<digest>/<path>", "The same for replicas that were added later with other code."),
        StoredKey(added_key("<run>", NUMBER), "Ranks that one `replicas add` has taken, and their backend."),
        StoredKey("<run>/handles/<attempt>.json", "Copies of all handles of a launch, so that one read finds them."),
        StoredKey("<run>/decisions/<index>.json", "One entry of the decision log: a restart, or an order of a user."),
        StoredKey(f"{notices_prefix('<run>')}<name>.json", "The sender of a notification, or its result."),
        StoredKey(f"<run>/{ATTACHED_LEASE}", "The lease of an attached run. The launching process renews it."),
        StoredKey(f"<run>/{STARTS}<nonce>.json", "The lease of a start of detached replicas, until all have started."),
        StoredKey(
            "<run>/metrics/<rank>/<attempt>/<number>.jsonl",
            "One segment of an attempt's measurements. [Metrics](metrics.md) describes its lines.",
        ),
    ]


def keys_of_attempt() -> list[StoredKey]:
    """Return the keys of one attempt of a rank."""

    def key(name: str) -> str:
        return replica_key("<run>", RANK, ATTEMPT, name)

    found = []
    for name, value in vars(record_names).items():
        if name.isupper() and name not in (*OF_RUN, *WITHOUT_NAME):
            found.append(StoredKey(key(value), _meaning(f"{NAMES}.{name}")))
    return [
        *found,
        StoredKey(key(warning_record.NAME), "The warnings of the attempt, each text once."),
        StoredKey(key(log_copy.NAME), "The output of the replica, if it does not run on the launching machine."),
        StoredKey(key(rule_record_name("<number>", BROKEN)), "A broken rule, with its evidence."),
        StoredKey(key(rule_record_name("<number>", UNJUDGED)), "A rule that was not judged, and why."),
        StoredKey(key("stacks/<number>.txt"), "The stacks of the replica's threads, from one dump."),
        StoredKey(key("health-<nonce>"), "An object of a health check, which deletes it again."),
        StoredKey(key("artifacts/<path>"), "A file that the replica saved with `save_artifact(name, path)`."),
        StoredKey(spare_key("<run>", NUMBER, ATTEMPT, "<path>"), "The same records for a spare."),
        *(
            StoredKey(key(f"{name.removesuffix('.json')}-<digits>.json"), f"`{name}` of a signed run.")
            for name in SIGNED
        ),
    ]


def keys_of_diloco() -> list[StoredKey]:
    """Return the keys of one DiLoCo, from the methods of `Keys`."""
    keys, found = Keys("<run>", "<name>"), []
    for name, method in inspect.getmembers(Keys, inspect.isfunction):
        text = _meaning(f"diloco.rendezvous.keys.Keys.{name}") if not name.startswith("_") else ""
        if not text or name in OF_RUN_KEYS or text.startswith("The prefix"):
            continue
        values = {
            each: "<nonce>" if each == "nonce" else _Blank.of(_BLANKS.get(each, each))
            for each in list(inspect.signature(method).parameters)[1:]
            if each != "member"
        }
        found.append(StoredKey(getattr(keys, name)(**values), text))
        if "part" in values:  # the first part has a name without a number
            found.append(StoredKey(getattr(keys, name)(**values | {"part": 0}), text))
    return sorted(found)


_BLANKS = {"index": "part"}


def stored_keys() -> list[StoredKey]:
    """Return all keys of a run in its store."""
    return [*keys_of_run(), *keys_of_attempt(), *keys_of_diloco()]


def _meaning(path: str) -> str:
    """Return the meaning of a key, from the docstring of its constant or of its method."""
    docstring = definition_of(path).docstring
    text = " ".join(docstring.value.partition("\n\n")[0].split()) if docstring else ""
    text = re.sub(r"; see [^.]*(?:\.[a-z_][^.]*)*\.$", ".", text)
    if found := re.match(r"Return the key of (.*)", text):
        return found[1][0].upper() + found[1][1:]
    return re.sub(r"^Return the ", "The ", text)


def _rows(keys: Sequence[StoredKey]) -> str:
    return table(("key", "content"), [[code(each.pattern), each.meaning] for each in keys])


def stored_keys_page() -> str:
    """Return the page of stored keys."""
    return "\n\n".join(_blocks()) + "\n"


def _blocks() -> Iterator[str]:
    yield "# Stored keys"
    yield (
        "A run is a prefix in its store. The keys are an interface: you may look at them with other tools. They may "
        "change until version 1.0: see [Stability](../stability.md)."
    )
    yield (
        "Names in angle brackets stand for values. A `<rank>` below `replicas/` and `metrics/` has four digits, as in "
        "`0003`. An `<entry>` is the number of a round in the log, from 0."
    )
    yield "## The run"
    yield _rows(keys_of_run())
    yield "## Attempts"
    yield _rows(keys_of_attempt())
    signed = ", ".join(map(code, SIGNED))
    yield (
        f"In a signed run, the records {signed} have a second name with digits, such as `outcome-<digits>.json`. The "
        "record with the digits counts."
    )
    yield "## DiLoCo"
    yield (
        "`<name>` is the name of the DiLoCo, which is `main` by default. In a replica of several processes, each "
        "process other than the first keeps its state below `own/<rank>.<member>`."
    )
    yield _rows(keys_of_diloco())
    yield "[ADR 0034](../explanation/decisions.md) describes each object of a round byte by byte."
    yield "## Files on the launching machine"
    yield (
        "The machine that launched a run keeps more in `~/.local/state/replicas`. Only its user can read these files:"
    )
    yield table(
        ("file", "content"),
        [
            [
                code("<run>/launched.json"),
                "The store, the digest of the task, the options of the backend, and the names of secrets.",
            ],
            [code("<run>/jobs.jsonl"), "The ids of its jobs, so that `replicas cancel` needs no bucket."],
            [code("<run>/supervisors.lock"), "Locked by the supervisor of local replicas."],
            [code(".keys/<run>"), "The key of a signed run."],
        ],
    )
    yield (
        "If a power failure damaged `launched.json`, `replicas ls` reports it, and the run's address still works. To "
        "resume the run, give `--task-digest`, as on another machine."
    )
