"""The verb `backends`: lists the backends with their options."""

from __future__ import annotations

import inspect
import json
import re
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from executors.cli.documents import BackendDocument, BackendOption, BackendsDocument
from executors.cli.options import complete_backend, name_type
from executors.cli.output import JsonOption, Output
from executors.cli.verb_help import describe
from executors.registry import parameters_of

if TYPE_CHECKING:
    pass

NAME = "A backend, or pkg.mod:Class. Default: all backends."


@describe(examples=["replicas backends", "replicas backends modal"])
def backends(
    name: Annotated[str | None, Argument(metavar="NAME", help=NAME, autocompletion=complete_backend)] = None,
    as_json: JsonOption = False,
) -> int:
    """List the backends with their options, and whether they are ready."""
    from executors.registry import executor_class, known_backends

    output, known = Output(as_json), known_backends()
    if name is not None and name not in known:
        executor_class(name)  # raises an error for an unknown name, and loads a class of the user
        known = {name: name}
    found = [_describe(each, path) for each, path in sorted(known.items()) if name in (None, each)]
    if as_json:
        document: BackendsDocument = {"backends": found}
        output.document(document)
        return 0
    if name is not None:
        _print_backend(output, found[0])
        return 0
    for backend in found:
        _print_backend(output, backend)
        output.print()
    output.print("Your own backend: --backend pkg.mod:Class. Options: --option NAME=VALUE.", "dim")
    return 0


def _describe(name: str, path: str) -> BackendDocument:
    from executors.registry import executor_class, get_executor

    described: BackendDocument = {
        "name": name,
        "executor": path,
        "ready": False,
        "problem": None,
        "about": "",
        "options": [],
    }
    try:
        cls = executor_class(name)
        described["about"] = (inspect.getdoc(cls) or "").partition("\n")[0]
        described["options"] = describe_options(cls)
        executor: Any = get_executor(name)
        described["network_between_replicas"] = bool(executor.supports_inter_replica_network)
        described["ready"] = True
    except Exception as error:  # noqa: BLE001 - the class of another package may raise anything; all of it is the reason
        described["problem"] = str(error) or type(error).__name__
    return described


def _print_backend(output: Output, backend: BackendDocument) -> None:
    from rich.padding import Padding
    from rich.text import Text

    state = ("ready", "green") if backend["ready"] else (f"not ready: {backend['problem']}", "red")
    output.print(Text.assemble((backend["name"], "bold"), "  ", state, (f"  {backend['executor']}", "dim")))
    if backend["about"]:
        output.print(f"  {backend['about']}")
    for option in backend["options"]:
        kind = f" {option['type']}" if option["type"] else ""
        default = "required" if option["required"] else f"default {json.dumps(option['default'])}"
        output.print(Text.assemble((f"  {option['name']}", "cyan"), kind, (f", {default}", "dim")))
        if option["help"]:
            output.print(Padding(Text(option["help"]), (0, 0, 0, 6), expand=False))


def describe_options(cls: type) -> list[BackendOption]:
    """Describe the options of an executor's class, from the signature and the docstrings of its constructor.

    Args:
        cls: the class.

    Example:
        describe_options(LocalExecutor)[0]["name"]
    """
    texts = _texts_of_arguments(f"{inspect.getdoc(cls)}\n{inspect.getdoc(vars(cls).get('__init__'))}")
    return [
        {
            "name": name,
            "type": name_type(parameter.annotation),
            "required": (is_required := parameter.default is parameter.empty),
            "default": None if is_required else json.loads(json.dumps(parameter.default, default=repr, skipkeys=True)),
            "help": texts.get(name, ""),
        }
        for name, parameter in parameters_of(cls).items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def _texts_of_arguments(doc: str) -> dict[str, str]:
    """Return the entries of the `Args:` section of a docstring, by parameter."""
    section = re.split(r"\n(?=\S)", doc.partition("Args:\n")[2])[0]
    found = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
