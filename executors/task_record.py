"""`task.json`: what the replicas of a run call, and what else was decided at its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executors.records import Fields, integer, json_object, list_of, nullable, text
from executors.run_record import ANY_SEED, SHA256, LaunchedWith


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """What `task.json` says: what to call, and with what."""

    python: str
    """The minor version that a pickle is of."""
    entrypoint: str | None = None
    """None: the pickled callable."""
    args: Mapping[str, Any] | None = None
    callable_sha256: str | None = None
    rank_env: str | None = None
    """The name of one more environment variable for the rank."""
    seed: int | None = None
    """What the replicas' generators are seeded from; None: the run id."""
    requirements: tuple[str, ...] = ()
    python_version: str | None = None
    """The launcher's; None: the replicas have the launcher's Python."""
    torch: str | None = None
    launched_with: LaunchedWith | None = None
    """What else decides what runs where. None: a task of no launch, which is not resumed."""

    @classmethod
    def parse(cls, data: Any, key: str = "task.json", url: str = "") -> TaskRecord:
        """Read what stands under the key.

        Raises:
            CorruptObjectError: it is no task; the message names what of it does not fit.
        """
        fields = Fields(data, key, url)
        launched_with = fields.take("launched_with", nullable(json_object), None)
        task = cls(
            python=fields.take("python", text(100)),
            entrypoint=fields.take("entrypoint", nullable(text()), None),
            args=fields.take("args", nullable(json_object), None),
            callable_sha256=fields.take("callable_sha256", nullable(text(64, SHA256)), None),
            rank_env=fields.take("rank_env", nullable(text(1000)), None),
            seed=fields.take("seed", nullable(integer(-ANY_SEED, ANY_SEED)), None),
            requirements=fields.take("requirements", list_of(text()), ()),
            python_version=fields.take("python_version", nullable(text(100)), None),
            torch=fields.take("torch", nullable(text(100)), None),
            launched_with=None if launched_with is None else LaunchedWith.parse(launched_with, key, url),
        )
        if task.entrypoint is None and task.callable_sha256 is None:
            raise fields.refusal("it names neither an entrypoint nor a callable")
        return task
