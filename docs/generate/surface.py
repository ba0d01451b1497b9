"""Lists the public surface in `docs/surface.txt`, so that a change of it is seen in a diff.

python -m docs.generate.surface    writes the file
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import griffe

from docs.generate import api
from docs.generate.json_documents import schema_of
from docs.generate.metrics import columns
from docs.generate.outcomes import EXIT_CODES, REASONS
from docs.generate.stored_keys import stored_keys
from executors.cli.documents import KINDS

SURFACE = Path(__file__).parents[1] / "surface.txt"
MODULES = (
    api.Module("executors"),
    api.Module("executors.errors", has_only_errors=True),
    api.Module("executors.testing"),
    api.Module("diloco"),
    api.Module("diloco.errors", has_only_errors=True),
    api.Module("diloco.testing", ("run_replicas",)),
    api.Module("diloco.trainers.hf", ("DiLoCoCallback", "replica_arguments")),
    api.Module("diloco.trainers.lightning", ("DiLoCoCallback",)),
)
"""The modules whose public names users may rely on."""


def python_lines() -> Iterator[str]:
    """Yield a line for each public function, class and member, with its parameters."""
    for module in MODULES:
        for part in api.parts_of(module):
            yield from _lines_of(part, has_members=not module.has_only_errors)


def _lines_of(part: api.Part, *, has_members: bool = True) -> Iterator[str]:
    here = part.definition
    words = ", ".join(_parameter(each) for each in api.parameters_of(here))
    is_called = here.is_function and "property" not in here.labels
    yield f"python {part.path}" + (f"({words})" if words or is_called else "")
    if has_members and here.is_class and not api.backend_of(here):
        for name, target in api.public_members(here):
            yield from _lines_of(api.Part(f"{part.path}.{name}", target))


def _parameter(each: griffe.Parameter) -> str:
    stars = {"variadic positional": "*", "variadic keyword": "**"}.get(each.kind.value if each.kind else "", "")
    return f"{stars}{each.name}" + ("=" if each.default is not None and not stars else "")


def command_lines() -> Iterator[str]:
    """Yield a line for each verb of the command, and for each of its options."""
    from executors.cli import command_of

    for name, verb in command_of().commands.items():
        yield f"command {name}"
        for option in verb.params:
            if option.param_type_name == "argument":
                yield f"command {name} {option.metavar or option.name.upper()}"
            elif option.name != "help" and not getattr(option, "hidden", False):
                yield f"command {name} {', '.join((*option.opts, *option.secondary_opts))}"


def other_lines() -> Iterator[str]:
    """Yield a line for each setting, option of a backend, exit code and reason of an outcome."""
    from executors.cli import command_of
    from executors.cli.backends import describe_options
    from executors.cli.config import keys_of
    from executors.registry import executor_class, known_backends

    yield from (f"setting {key}" for key in keys_of(command_of().commands["launch"]))
    for name in known_backends():
        yield f"backend {name}"
        yield from (f"backend {name} {each['name']}" for each in describe_options(executor_class(name)))
    yield from (f"exit code {number}" for number in EXIT_CODES)
    yield from (f"outcome {reason}" for reason in REASONS)


def json_lines() -> Iterator[str]:
    """Yield a line for each field of each JSON document. A dot follows the name of an object inside a document."""
    for kind in KINDS:
        schema = schema_of(kind, is_strict=True)
        yield f"json {kind.name}"
        yield from (f"json {kind.name} {name}" for name in schema["properties"])
        for inner, each in schema.get("$defs", {}).items():
            yield from (f"json {kind.name} {inner}.{name}" for name in each["properties"])


def stored_lines() -> Iterator[str]:
    """Yield a line for each key in a run's store, and for each column of the metrics."""
    yield from (f"key {each.pattern}" for each in stored_keys())
    yield from (f"metric {each.kind} {each.name}" for each in columns())


def surface() -> str:
    """Return the text of `docs/surface.txt`."""
    return "\n".join(sorted({*python_lines(), *command_lines(), *other_lines(), *json_lines(), *stored_lines()})) + "\n"


if __name__ == "__main__":
    SURFACE.write_text(surface(), encoding="utf-8")
    print(f"Wrote {SURFACE}.")
