"""`replicas backends`."""

from __future__ import annotations

import inspect
import json
from typing import Any

from executors.cli.options import JsonOption
from executors.cli.output import Output


def backends(as_json: JsonOption = False) -> int:
    """List the backends, whether they are ready here, and their options."""
    from executors.registry import known_backends

    output = Output(as_json)
    found = [_describe(name, path) for name, path in sorted(known_backends().items())]
    if as_json:
        output.document(found)
        return 0
    for number, backend in enumerate(found):
        if number:
            output.say()
        _tell(output, backend)
    output.say()
    output.say("An executor of your own: --backend pkg.mod:Class. Give options as --option NAME=VALUE.", "dim")
    return 0


def _describe(name: str, path: str) -> dict[str, Any]:
    from executors.cli.backend_options import options_of
    from executors.registry import executor_class, get_executor

    described: dict[str, Any] = {
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
        described["options"] = [
            {
                "name": option.name,
                "type": option.type_name,
                "required": option.default is inspect.Parameter.empty,
                "default": _json(option.default),
                "help": option.help,
            }
            for option in options_of(cls)
        ]
        executor: Any = get_executor(name)
        described["network_between_replicas"] = bool(executor.supports_inter_replica_network)
        described["ready"] = True
    except Exception as error:  # noqa: BLE001 - another package's class: whatever it raises is why it is not ready
        described["problem"] = str(error) or type(error).__name__
    return described


def _tell(output: Output, backend: dict[str, Any]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    state = ("ready", "green") if backend["ready"] else (f"not ready: {backend['problem']}", "red")
    output.say(Text.assemble((backend["name"], "bold"), "  ", state, (f"  {backend['executor']}", "dim")))
    if backend["about"]:
        output.say(f"  {backend['about']}")
    for option in backend["options"]:
        kind = f" {option['type']}" if option["type"] else ""
        default = "required" if option["required"] else f"default {json.dumps(option['default'])}"
        output.say(Text.assemble((f"  {option['name']}", "cyan"), kind, (f", {default}", "dim")))
        if option["help"]:
            output.say(Padding(Text(option["help"]), (0, 0, 0, 6), expand=False))


def _json(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return None
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
