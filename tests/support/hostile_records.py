"""Records that a hostile owner of a bucket may write: malformed ones, lies, and ones that try to run code."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from executors.process import this_machine
from executors.task.record import LaunchedWith
from support.new_runs import run_json as run_json

LAUNCHED_WITH = {field.name for field in fields(LaunchedWith)}
DEEP = "[" * 900 + "]" * 900
DEEPER = "[" * 200_000 + "]" * 200_000
LONG = "x" * 3_000_000
ANSI = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\x00\r"


def task_json(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a task that fits the record of a run, with changes."""
    launched_with = {name: value for name, value in record.items() if name in LAUNCHED_WITH}
    whole = {"python": "3.12", "entrypoint": "os:getcwd", "args": {}, "launched_with": launched_with}
    return {**whole, **changes}


def outcome_json(rank: int, **changes: Any) -> dict[str, Any]:
    return {"rank": rank, "attempt": 0, "status": "succeeded", "finished_at": 1.7e9, "result": None, **changes}


def local_handle(rank: int = 0, **metadata: Any) -> dict[str, Any]:
    """A handle of the local backend that a supervisor may have left."""
    whole = {
        "run_id": "bad",
        "store_url": "file:///nowhere",
        "attempt": 0,
        "machine": this_machine(),
        "supervisor_pid": 2**30,  # beyond every kernel's limit
        "supervisor_started": 1,
        "term_grace_s": 0.1,
    }
    return {"rank": rank, "backend_name": "local", "metadata": {**whole, **metadata}}


NO_OBJECTS = {
    "nothing": b"",
    "an empty object": b"{}",
    "a list": b"[]",
    "null": b"null",
    "a number": b"7",
    "half a record": b'{"entrypoint": "local", "sett',
    "no text": b"\xff\xfe\x00\xd8",
    "deep": DEEP.encode(),
    "deeper than any stack": DEEPER.encode(),
    "deep inside": json.dumps(run_json()).replace('"created_by"', f'"code": {{"a": {DEEP}}}, "created_by"').encode(),
    "an integer of a million digits": b'{"created_at": ' + b"9" * 1_000_000 + b"}",
    "three megabytes": json.dumps(run_json(cwd=LONG)).encode(),
}
"""Objects that every parser of records must refuse."""

BAD_FIELDS: dict[str, list[Any]] = {
    "n": ["four", 10**7, 10_001, -1, 0, True, 2.5, None, [2], {"n": 2}, float("nan"), float("inf")],
    "backend": [5, None, "", "a" * 1000, "../local", "\x1b[31mlocal", "local\nlocal", "subprocess:Popen", ["local"]],
    "entrypoint": [None, 5, ["a"], "x" * 100_000],
    "task_digest": [None, 5, "", "../../etc/passwd", "g" * 64],
    "created_at": ["now", None, -1, 1e300, float("nan"), float("-inf"), True],
    "executor": [5, "os", ["os:system"], "os:system:more", "x" * 1000],
    "executor_options": [[], "preload", 5],
    "env": ["PATH", {"PATH": "x"}, [5]],
    "secrets": ["HOME", [None]],
    "chaos": [{"kill": 1}, [["kill"]]],
    "timeout_s": ["soon", -1, float("nan"), [1]],
    "gpu": [5, {}, "x" * 1000],
    "seed": ["one", 1.5, 10**200],
    "detach": ["yes", 1],
    "code": ["git", 5],
}
"""Fields of `run.json`, and for each field values that must be refused with an error that names the field."""

BAD_RUNS = {
    **NO_OBJECTS,
    **{
        f"{field} {number}": json.dumps(run_json(**{field: value})).encode()
        for field, values in BAD_FIELDS.items()
        for number, value in enumerate(values)
    },
}

BAD_OUTCOME_FIELDS: dict[str, list[Any]] = {
    "rank": [1, -1, "0", True, 10**30],
    "attempt": [1, "0"],
    "status": ["running", "pending", "won", None, 5, ["succeeded"], {}],
    "reason": ["because", 5, []],
    "exit_code": ["0", 1e3, 10**30],
    "error": [5, ["a"], "x" * 2_000_000],
    "finished_at": ["now", float("nan"), 1e300],
    "output_tail": [None, 5],
    "pid": [-1, 0, "1"],
    "host": [5],
    "warned": [5, {"count": 10**6, "first": "x", "first_at": 1}, {"count": 1, "first": 5, "first_at": 1}],
    "trained_alone": ["yes"],
    "own_models": ["yes", [1.0], 0.5],
    "unproven": ["yes", None],
}
BAD_OUTCOMES = {
    **{name: data for name, data in NO_OBJECTS.items() if name != "deep inside"},
    **{
        f"{field} {number}": json.dumps({**outcome_json(0), field: value}).encode()
        for field, values in BAD_OUTCOME_FIELDS.items()
        for number, value in enumerate(values)
    },
}

BAD_DECISION_FIELDS: dict[str, list[Any]] = {
    "kind": ["reboot", None, 5, ["stop"]],
    "rank": ["0", -1, 10**7, True],
    "ended": ["0", -1, 10**5],
    "start": [
        [0, 1],
        {"zero": 1},
        {"-1": 1},
        {"01": 1},
        {"\u0661": 1},
        {" 1": 1},
        {"9" * 5000: 1},
        {"0": "1"},
        {"0": -1},
        {str(rank): 1 for rank in range(20_001)},
    ],
    "charged": ["yes", 1],
    "strikes": [-1, 10**9, "1"],
    "not_before": ["soon", float("nan"), 1e300, -1],
    "reached": [[1], {"step": "far"}, {"step": float("nan")}, {"step": 10**400}, {"x" * 1000: 1}],
    "fingerprint": [5, "x" * 1000],
    "why": [None, "x" * 100_000],
    "words": ["x" * 100_000],
    "within_s": [-1, "1m"],
    "restarts": [5, "many", "3,oom=" + "9" * 300, "3/0.00000001s"],
    "hang": ["soon", "0s"],
    "at": ["now", -1, float("inf")],
}
BAD_DECISIONS = {
    **{name: data for name, data in NO_OBJECTS.items() if name != "deep inside"},
    **{
        f"{field} {number}": json.dumps({"kind": "stop", field: value}).encode()
        for field, values in BAD_DECISION_FIELDS.items()
        for number, value in enumerate(values)
    },
    "a megabyte": json.dumps({"kind": "stop", "color": "x" * 10**6}).encode(),
}
"""Entries of the decision log that must be refused with an error that names their key."""
LYING_DECISIONS: list[dict[str, Any]] = [
    {"kind": "restart", "rank": 10**6, "ended": 0, "start": {"1000000": 9999}, "words": ANSI, "at": 1e10},
    {"kind": "give_up", "rank": 0, "ended": 9999, "why": ANSI, "words": ANSI, "reason": "x"},
    {"kind": "stop", "within_s": 1e11, "not_before": 1e11, "why": "asked", "reached": {"step": 1e299}},
    {"kind": "resume", "start": {str(rank): 10_000 for rank in range(20_000)}},
    {"kind": "restart", "rank": 0, "ended": 0, "start": {"0": 10_000}, "not_before": 1e11, "words": ANSI},
    # This entry names no attempt to start, but would count as the decision about an end.
    {"kind": "restart", "rank": 0, "ended": 5, "start": {}},
    {"kind": "cancel"},
]

BAD_HANDLES = {
    **{name: data for name, data in NO_OBJECTS.items() if name != "deep inside"},
    **{
        name: json.dumps(handle).encode()
        for name, handle in {
            "another backend": {**local_handle(), "backend_name": "hf"},
            "a rank that is none": {**local_handle(), "rank": "0"},
            "metadata that is none": {**local_handle(), "metadata": ["a"]},
            "no metadata": {**local_handle(), "metadata": {}},
            "a pid that is a path": local_handle(supervisor_pid="../../self"),
            "a pid of a group": local_handle(supervisor_pid=-1),
            "the pid 0": local_handle(supervisor_pid=0),
            "a pid beyond all": local_handle(supervisor_pid=10**30),
            "a pid that is true": local_handle(supervisor_pid=True),
            "no start time": local_handle(supervisor_started=None),
            "no machine": local_handle(machine=""),
            "a machine that is none": local_handle(machine=["a", "b", "c"]),
            "endless patience": local_handle(term_grace_s=1e9),
            "patience that is none": local_handle(term_grace_s=float("nan")),
        }.items()
    },
}
"""Handles of the local backend that must be refused when they are used."""

ODD_BEATS = {
    **{name: data for name, data in NO_OBJECTS.items() if name != "deep inside"},
    "no number": b'{"at": "now"}',
    "long ago": b'{"at": -1e300}',
    "warnings that are none": b'{"at": 1.7e9, "replicas.warnings": 3}',
    "a count that is none": b'{"at": 1.7e9, "replicas.warnings": {"count": -1, "first": "x", "first_at": 1}}',
}

HOSTILE_WARNINGS = {
    **{name: data for name, data in NO_OBJECTS.items() if name not in ("deep inside", "three megabytes")},
    "too many": json.dumps({"warnings": [{"text": "x", "at": 1, "last_at": 1, "count": 1}] * 65}).encode(),
    "a text that is too long": json.dumps({"warnings": [{"text": LONG, "at": 1, "last_at": 1, "count": 1}]}).encode(),
}
"""Records of warnings that must be refused with an error that names their key."""
LYING_WARNINGS = {
    "warnings": [
        {"text": ANSI + "<script>alert(1)</script>" + str(n), "at": 1e10, "last_at": 1e10, "count": 2**53}
        for n in range(64)
    ],
    "left_out": 2**53,
}
"""Warnings whose text tries to control the terminal or page that shows them."""

LYING_BEATS = {
    "reports that are not numbers": {"at": 1.7e9, "loss": ANSI, "step": [1], "round": {}, "round_s": True},
    "numbers that are too large": {"at": 1.7e9, "loss": 10**400, "step": float("inf"), "round": float("nan")},
}
"""Heartbeats with wrong fields. Their correct fields must be shown."""

BAD_TASK_FIELDS: dict[str, dict[str, Any]] = {
    "an entrypoint that is none": {"entrypoint": ["os:system"]},
    "arguments that are none": {"args": ["a"]},
    "no entrypoint": {"entrypoint": None},
    "a command that is none": {"entrypoint": None, "command": "true"},
    "a command without words": {"entrypoint": None, "command": []},
    "a digest that is none": {"entrypoint": None, "callable_sha256": "../x"},
    "modules that are none": {"modules": "train"},
    "a variable that is none": {"rank_env": 5},
    "requirements that are none": {"requirements": "torch"},
    "a launch that is none": {"launched_with": ["a"]},
    "no word of its launch": {"launched_with": None},
    "half a launch": {"launched_with": {"entrypoint": "job:main"}},
}
BAD_TASKS = {
    **{name: data for name, data in NO_OBJECTS.items() if name not in ("deep inside", "three megabytes")},
    **{name: json.dumps(task_json(run_json(), **changes)).encode() for name, changes in BAD_TASK_FIELDS.items()},
}

ODD_ARTIFACTS = [
    "../../../escaped",
    "..",
    "a/../../escaped",
    "/tmp/absolute",
    "",
    "a//b",
    "./here",
    "red\x1b[31m",
    "two\nlines",
    "right\u202eto-left",
    "taken",  # there is also "taken/below": both cannot be files
    "z" * 300,
]

ASKS: dict[str, dict[str, Any]] = {
    "the evidence": {"executor": "subprocess:Popen", "executor_options": {"args": ["touch", "ran"]}},
    "a module beside": {"executor": "evil_backend:Executor"},
    "a module beside, under a good name": {"backend": "local", "executor": "evil_backend:Executor"},
    "an unknown backend": {"backend": "evil_backend"},
    "an option that imports": {"executor_options": {"preload": ["evil_backend"]}},
    "an option that the backend does not have": {"executor_options": {"args": ["touch", "ran"]}},
    "an image of theirs": {"backend": "modal", "executor_options": {"image": "evil/image"}},
    "secrets of ours": {"backend": "hf", "executor_options": {"secrets": ["AWS_SECRET_ACCESS_KEY"]}},
    "a namespace that is a path": {"backend": "hf", "executor_options": {"namespace": "../models"}},
    "a name that is none": {"backend": "modal", "executor_options": {"app_name": ["a"]}},
}
"""Runs whose records try to run code, or to reach files and objects of the reader."""

SHOWN: dict[str, Any] = {
    "created_by": ANSI,
    "entrypoint": ANSI + "[bold]main[/bold]",
    "chaos": [ANSI],
    "env": [ANSI],
}
"""Texts in records that a terminal or a page must escape."""
