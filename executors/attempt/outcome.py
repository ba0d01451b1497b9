"""The outcome of an attempt: how `outcome.json` is parsed and written, and the sentences that describe an end."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from executors.errors import CorruptObjectError
from executors.protocol import ENDED, REASONS, MemberEnd, Outcome, ReplicaStatus, Standstill, WarningCount
from executors.settings.procs import MAX_PROCS
from executors.store.record_names import OUTCOME
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    Fields,
    anything,
    flag,
    integer,
    is_plain_number,
    json_object,
    list_of,
    nullable,
    number,
    one_of,
    text,
    to_bytes,
)

MAX_RANK = 10**6  # replicas may join with ranks beyond those that were launched
MAX_ATTEMPTS = 10_000
PID = integer(1, 2**31 - 1)
COUNT = integer(0, 2**53)
EXIT_CODE = integer(-(2**31), 2**31)
OUTPUT_TAIL_BYTES = 64 * 1024
OUTPUT_TAIL_LINES = 200  # lines to ask a service for, if a replica left no outcome
MAX_OUTCOME_BYTES = 32 << 20
MAX_ERROR = 1 << 20  # characters
MAX_PLACE = 1000  # characters
MAX_WARNINGS = 64  # the most different warnings of one attempt
MAX_KEY = 1000  # characters
OBJECT_OF_ROUND = re.compile(
    r"[a-z0-9][a-z0-9-]{0,39}/diloco/(?!\.{1,2}/)[^/\x00-\x1f\x7f]{1,200}/(?:r\d+/(?:contribution|mean)|seal|snapshot)/\d+"
)
MAX_FIRST = 200  # characters of the first warning in a heartbeat or an outcome


def parse_outcome(data: Any, key: str = OUTCOME, url: str = "") -> Outcome:
    """Parse `outcome.json`.

    Args:
        data: the bytes.
        key: the key of the object, for the error. Default: the record's name.
        url: the url of the store, for the error. Default: not named.

    Raises:
        CorruptObjectError: the bytes are not an outcome. The message names the field.
    """
    fields = Fields(data, key, url)
    reason: Any = fields.take("reason", nullable(one_of(*REASONS)), None)
    reported = fields.take("reported", nullable(json_object), None)
    reached = fields.take("reached", nullable(json_object), None)
    own_models = fields.take("own_models", nullable(json_object), None)
    return Outcome(
        rank=fields.take("rank", integer(0, MAX_RANK)),
        attempt=fields.take("attempt", integer(0, MAX_ATTEMPTS)),
        status=ReplicaStatus(fields.take("status", one_of(*ENDED))),
        reason=reason,
        exit_code=fields.take("exit_code", nullable(EXIT_CODE), None),
        signal=fields.take("signal", nullable(text(100)), None),
        error=fields.take("error", nullable(text(MAX_ERROR)), None),
        error_line=fields.take("error_line", nullable(text(MAX_ERROR)), None),
        error_place=fields.take("error_place", nullable(text(MAX_PLACE)), None),
        result=fields.take("result", anything, None),
        host=fields.take("host", text(1000), ""),
        pid=fields.take("pid", nullable(PID), None),
        started_at=fields.take("started_at", nullable(number(LONG_AGO, FAR_AHEAD)), None),
        finished_at=fields.take("finished_at", number(LONG_AGO, FAR_AHEAD), 0.0),
        output_tail=fields.take("output_tail", text(MAX_ERROR), ""),
        reported=None if reported is None else only_numbers(reported),
        reached=None if reached is None else only_numbers(reached),
        progress_marks=fields.take("progress_marks", COUNT, 0),
        saved_marks=fields.take("saved_marks", COUNT, 0),
        fingerprint=fields.take("fingerprint", nullable(text(100)), None),
        how=fields.take("how", nullable(text(40)), None),
        notice=fields.take("notice", nullable(text(40)), None),
        stacks=fields.take("stacks", list_of(text(100)), ()),
        was_refused=fields.take("was_refused", flag, False),
        warned=fields.take("warned", nullable(warning_count), None),
        trained_alone=fields.take("trained_alone", flag, False),
        own_models=None if own_models is None else only_numbers(own_models),
        member=fields.take("member", nullable(integer(0, MAX_PROCS - 1)), None),
        members=fields.take("members", list_of(member_end), ()),
        goes_on=fields.take("goes_on", flag, False),
        unproven=fields.take("unproven", flag, False),
    )


def member_end(value: Any) -> MemberEnd:
    """Check the end of one process of a replica in its outcome.

    Args:
        value: a JSON object, such as `{"pid": 4711, "exit_code": -9, "signal": "SIGKILL"}`.

    Raises:
        ValueError: the value is something else; the message names what was expected.

    Example:
        member_end({"pid": 4711, "exit_code": 0}).exit_code
    """
    try:
        fields = Fields(json_object(value), "members")
        return MemberEnd(
            pid=fields.take("pid", PID),
            exit_code=fields.take("exit_code", nullable(EXIT_CODE), None),
            signal=fields.take("signal", nullable(text(100)), None),
            error=fields.take("error", nullable(text(MAX_ERROR)), None),
        )
    except CorruptObjectError as error:
        raise ValueError(f"the end of a process ({error})") from None


def warning_count(value: Any) -> WarningCount:
    """Check the number of warnings of an attempt in its heartbeat or its outcome.

    Args:
        value: a JSON object, such as `{"count": 2, "first": "…", "first_at": 1.7e9}`.

    Raises:
        ValueError: the value is something else; the message names what was expected.
    """
    try:
        fields = Fields(json_object(value), "warnings")
        return WarningCount(
            count=fields.take("count", integer(1, MAX_WARNINGS + 1)),
            first=fields.take("first", text(MAX_FIRST)),
            first_at=fields.take("first_at", number(LONG_AGO, FAR_AHEAD)),
            standstill=fields.take("standstill", nullable(standstill), None),
        )
    except CorruptObjectError as error:
        raise ValueError(f"a count of warnings ({error})") from None


def standstill(value: Any) -> Standstill:
    """Check the standstill of a round in a count of warnings.

    Args:
        value: a JSON object, such as `{"round": 12, "key": "otter/diloco/main/seal/11", "n_more": 0}`.

    Raises:
        ValueError: the value is something else; the message names what was expected.

    Example:
        standstill({"round": 12, "key": "otter/diloco/main/seal/11", "n_more": 0}).key
    """
    try:
        fields = Fields(json_object(value), "standstill")
        return Standstill(
            round=fields.take("round", COUNT),
            # `status` advises the user to delete the object, so a record may only name an object of a round.
            key=fields.take("key", text(MAX_KEY, OBJECT_OF_ROUND)),
            n_more=fields.take("n_more", COUNT, 0),
        )
    except CorruptObjectError as error:
        raise ValueError(f"a standstill ({error})") from None


def only_numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers. Reports are only shown, so other values are left out without an error.

    Args:
        found: the reported values by name.
    """
    return {name: value for name, value in found.items() if is_plain_number(value) or value in (math.inf, -math.inf)}


def encode_outcome(outcome: Outcome) -> bytes:
    """Encode an outcome within the bounds that its readers accept. Long texts are cut, and a huge result is an error.

    Args:
        outcome: the outcome, whose values may come from an executor of a third party.
    """
    outcome = replace(outcome, exit_code=_readable_code(outcome.exit_code))
    if outcome.error is not None and len(outcome.error) > MAX_ERROR:
        half = MAX_ERROR // 2 - 10  # of a traceback, the begin and the message at the end matter
        outcome = replace(outcome, error=f"{outcome.error[:half]}\n…\n{outcome.error[-half:]}")
    if outcome.error_line is not None and len(outcome.error_line) > MAX_ERROR:
        outcome = replace(outcome, error_line=outcome.error_line[:MAX_ERROR])
    if outcome.error_place is not None:
        outcome = replace(outcome, error_place=outcome.error_place[-MAX_PLACE:])
    data = _to_bytes(outcome)
    if len(data) <= MAX_OUTCOME_BYTES:
        return data
    error = (
        f"The result has {len(data) >> 20} MiB as JSON, more than {MAX_OUTCOME_BYTES >> 20}. Keep it as a file with "
        "current_replica().save_artifact(name, path)."
    )
    failed = replace(
        outcome, status=ReplicaStatus.FAILED, reason="result_not_serializable", exit_code=1, error=error, result=None
    )
    return _to_bytes(failed)


def _to_bytes(outcome: Outcome) -> bytes:
    fields = asdict(outcome)
    if not outcome.unproven:  # only records of signed runs have this field
        del fields["unproven"]
    if not outcome.goes_on:  # only records of restartable entrypoints have this field
        del fields["goes_on"]
    if not outcome.members:  # only records of replicas with several processes have these fields
        del fields["member"], fields["members"]
    return to_bytes(fields)


def _readable_code(code: Any) -> int | None:
    with contextlib.suppress(ValueError):
        return EXIT_CODE(int(code) if isinstance(code, bool) else code)
    return None


ENDINGS = {
    "timeout": "ran into its time limit of {limit_s:g} s.",
    "hang": "{seen} for {for_s:.0f} s{where} (limit {limit}): {diagnosis}.{remedy}{stacks}",
    "rule": "was ended: {sentence}",
    "alive": "works again.",
    "oom": "was killed by the kernel (SIGKILL): out of memory.",
    "perhaps_oom": "was ended by signal 9 (SIGKILL). Perhaps memory ran out: "
    "at about the same time the kernel killed a process of this machine for that.",
    "signal": "was ended by signal {number} ({name}).",
    "terminated": "was terminated by {name}, not sent by `replicas`.",
    "told_to_end": "was terminated by {name}, sent by {service} or its administrators.",
    "cancelled": "was terminated by SIGTERM, since it was cancelled.",
    "announced": "left when {name} announced the end of its machine.",
    "stopped": "was stopped, as asked.",
    "orphaned": "was lost: its supervisor is gone (was it killed?). `replicas resume` brings it back.",
    "fenced": "was ended: a later attempt takes its place.",
    "no_result": "ended by itself with {code}, before its entrypoint returned a result.",
    "unrecorded": "returned a result that was not recorded. The replica's log has the reason.",
    "storeless": "ended by itself with {code}. Its store failed, so only the replica's log has the reason.",
    # Ends that a service reports:
    "killed": "was killed: {cause}.",
    "preempted": "was preempted: {service} took its machine back.",
    "timeout_there": "ran into the time limit of {service}.",
    "cancelled_there": "was cancelled at {service}, not by `replicas`.",
    "not_run": "could not run.",
    "by_exit_code": "was ended by {name} ({code}).",
    "not_reached": "ended with {code} before its entrypoint was reached.{why}",
}
"""The sentences about ends. Each follows the words `Replica 3 of 8`."""


def says_alive(stacks: str) -> bool:
    """Return True if a stack dump contains only the note that the replica works again after a suspected hang.

    Args:
        stacks: the text of the dump.

    Example:
        says_alive("Replica 3 of 8 works again.")
    """
    return stacks.partition("\n")[0].endswith(" " + ENDINGS["alive"])


def describe_cancel(rank: int, why: str) -> str:
    """Return the sentence about a cancel, as in `Replica 3 was ended: the launcher of this attached run ended.`

    Args:
        rank: the rank.
        why: the reason.
    """
    return f"Replica {rank} was ended: {why.rstrip('.')}."


def describe_end(ending: str, rank: int, world_size: int, **values: Any) -> str:
    """Return the sentence about an end, as in `Replica 3 of 8 ran into its time limit of 60 s.`

    Args:
        ending: a key of `ENDINGS`.
        rank: the rank.
        world_size: the number of replicas that were launched.
        values: the values for the sentence.
    """
    return f"Replica {rank} of {world_size} {ENDINGS[ending].format(**values)}"
