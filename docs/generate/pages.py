"""Lists the generated pages, and writes them.

python -m docs.generate.pages    writes each page whose text has changed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from docs.generate import api, command, decisions, json_documents, metrics, outcomes, results, scaling, stored_keys
from executors.cli import documents

FOLDER = Path(__file__).parents[1]
ROUNDS, OUTER, LINKS, WORK, IDENTITY = "Rounds", "Outer optimizer", "Slow links", "Work and data", "Identity"


def executors_page() -> str:
    return api.page_of(
        "Python API: `executors`",
        "This page lists everything that `from executors import …` offers. "
        "[Errors](errors.md) have a page of their own.",
        [api.Module("executors")],
        {},
    )


def diloco_page() -> str:
    return api.page_of(
        "Python API: `diloco`",
        "`DiLoCo` is the object that a training loop calls. README introduces it.",
        [api.Module("diloco")],
        {},
    )


def trainers_page() -> str:
    return api.page_of(
        "Callbacks for trainers",
        "One callback turns a trainer of Hugging Face or Lightning into a replica.",
        [
            api.Module("diloco.trainers.hf", ("DiLoCoCallback", "replica_arguments")),
            api.Module("diloco.trainers.lightning", ("DiLoCoCallback",)),
        ],
        {},
    )


def testing_page() -> str:
    return api.page_of(
        "Helpers for tests",
        "The contract suites prove an executor, a job service or a store of your own. "
        "`run_replicas` runs several replicas in one process.",
        [api.Module("executors.testing"), api.Module("diloco.testing", ("run_replicas",))],
        {},
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/executors.md": executors_page,
    "reference/diloco.md": diloco_page,
    "reference/trainers.md": trainers_page,
    "reference/testing.md": testing_page,
    "reference/cli.md": command.command_page,
    "reference/settings.md": command.settings_page,
    "reference/backends.md": command.backends_page,
    "reference/errors.md": outcomes.errors_page,
    "reference/outcomes.md": outcomes.outcomes_page,
    "reference/exit-codes.md": outcomes.exit_codes_page,
    "reference/json.md": json_documents.json_page,
    "reference/stored-keys.md": stored_keys.stored_keys_page,
    "reference/metrics.md": metrics.metrics_page,
    "explanation/decisions.md": decisions.decisions_page,
    "results/index.md": results.results_page,
    **scaling.PICTURES,
    **{f"json/{kind.name}.schema.json": partial(json_documents.schema_text, kind) for kind in documents.KINDS},
}
"""Each generated page, relative to `docs/`, and the function that returns its text."""


def write_pages() -> list[str]:
    """Write each generated page whose text has changed, and return the names of these pages."""
    changed = []
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    return changed


if __name__ == "__main__":
    print("\n".join(write_pages()) or "No generated page has changed.")
