"""Makes the pages about the command, its settings, and the backends' options, from what the command itself declares."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from docs.generate.markdown import code, table

OTHER = "Options"


def command_page() -> str:
    """Return the page about `replicas` and each of its verbs."""
    from executors.cli import SYNONYMS, command_of

    command = command_of()
    blocks = [
        "# The command `replicas`",
        "This page lists each verb with its options. `replicas VERB --help` prints the same text.",
        table(
            ("verb", "what it does", "other names that it suggests"),
            [
                [
                    f"[`{name}`](#replicas-{name})",
                    _first(verb.help),
                    ", ".join(code(other) for other, known in SYNONYMS.items() if known == name),
                ]
                for name, verb in command.commands.items()
            ],
        ),
    ]
    for name, verb in command.commands.items():
        blocks += _section(name, verb)
    return "\n\n".join(blocks) + "\n"


def _section(name: str, verb: Any) -> Iterator[str]:
    yield f"(replicas-{name})=\n## `replicas {name}`"
    yield _plain(inspect.cleandoc(verb.help or ""))
    arguments = [each for each in verb.params if each.param_type_name == "argument"]
    words = " ".join(_usage(each) for each in arguments)
    yield f"```text\nreplicas {name} [OPTIONS] {words}".rstrip() + "\n```"
    if arguments:
        yield table(
            ("argument", "meaning"), [[code(each.metavar or each.name), _cell(each.help)] for each in arguments]
        )
    panels: dict[str, list[list[str]]] = {}
    for option in verb.params:
        if option.param_type_name != "option" or option.name == "help" or getattr(option, "hidden", False):
            continue
        flags = ", ".join(code(flag) for flag in (*option.opts, *option.secondary_opts))
        value = "" if option.is_flag else code(option.metavar or option.type.name.upper())
        panel = getattr(option, "rich_help_panel", None)
        panels.setdefault(panel if isinstance(panel, str) else OTHER, []).append(
            [flags, value, _default(option), _cell(option.help)]
        )
    for panel, rows in panels.items():
        if len(panels) > 1:
            yield f"**{panel}**"
        yield table(("option", "value", "default", "meaning"), rows)
    if verb.callback.examples:
        yield "**Examples**"
        yield "```text\n" + "\n".join(verb.callback.examples) + "\n```"
    if verb.callback.exit_codes:
        yield "**Exit codes**"
        yield table(("code", "meaning"), [[code(str(n)), text] for n, text in verb.callback.exit_codes.items()])


def _usage(argument: Any) -> str:
    word = argument.metavar or argument.name.upper()
    return word if argument.required else f"[{word}]"


def _default(option: Any) -> str:
    value = option.default
    if value in (None, False, (), []) or callable(value) or type(value).__name__ in ("Sentinel", "_Sentinel"):
        return ""
    return code(str(value))


def _first(text: str | None) -> str:
    return _cell((text or "").strip().partition("\n\n")[0])


def _plain(text: str) -> str:
    """Return a help text without the marks of colors, and with its backslash lines as paragraphs."""
    return re.sub(r"\[/?(?:bold|dim|cyan)\]", "", text).replace("\b\n", "")


def _cell(text: str | None) -> str:
    return with_option_names(_plain(" ".join((text or "").split())))


def with_option_names(text: str) -> str:
    """Return a help text in which each option is code. A terminal needs no marks, and a page would break the dashes.

    Args:
        text: the help text, as Markdown.

    Example:
        with_option_names("Needs --restarts.")  # "Needs `--restarts`."
    """
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"(?<![\w-])(--[a-z](?:[a-z-]*[a-z])?)(?![\w-])", r"`\1`", part) for part in parts[::2]]
    return "".join(parts)


def settings_page() -> str:
    """Return the page about settings: each key of a settings file, with its option, argument and variable."""
    from executors.cli import command_of
    from executors.cli.config import keys_of

    launch = command_of().commands["launch"]
    options = {option.name: option for option in launch.params}
    rows = []
    for key, (name, kind) in keys_of(launch).items():
        option = options[name]
        kind_name = "list of texts" if kind == list[str] else getattr(kind, "__name__", str(kind)).lower()
        rows.append([code(key), ", ".join(code(flag) for flag in option.opts), kind_name, _cell(option.help)])
    return (
        "\n\n".join(
            [
                "# Settings",
                "Each option of `replicas launch` can be a key of a settings file. "
                "`replicas config --template` writes a file with all of them.",
                table(("key", "option", "type", "meaning"), rows),
            ]
        )
        + "\n"
    )


def backends_page() -> str:
    """Return the page about the backends and the options of each."""
    from executors.cli.backends import describe_options
    from executors.registry import executor_class, known_backends

    blocks = [
        "# Backends and their options",
        "Give an option of a backend as `--option NAME=VALUE`, or as `options={…}` of `launch()`. "
        "`replicas backends` prints this list, and says which backends are ready on this machine.",
    ]
    for name in sorted(known_backends()):
        cls = executor_class(name)
        blocks += [f"(backend-{name})=\n## `{name}`", (inspect.getdoc(cls) or "").partition("\n\n")[0]]
        rows = [
            [
                code(each["name"]),
                code(each["type"]),
                "required" if each["required"] else code(repr(each["default"])),
                each["help"],
            ]
            for each in describe_options(cls)
        ]
        blocks.append(table(("option", "type", "default", "meaning"), rows) if rows else "It has no options.")
    return "\n\n".join(blocks) + "\n"
