"""Makes the JSON Schemas of the documents that `--json` prints, and the page about them, from the types in the code."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import griffe

from docs.generate import api
from docs.generate.markdown import code, table
from executors.cli.documents import KINDS, VERSION, DocumentKind

Schema = dict[str, Any]
EXAMPLES = Path(__file__).parents[1] / "json"
"""The folder with an example of each document. Real calls printed them: see `tests/support/json_scene.py`."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
PLAIN: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
VERSION_TEXT = "The version of the JSON documents."
NOTES_TEXT = "A sentence for each number that is null because JSON cannot write it. Absent: there is none."
SHOWN_LINES = 60  # of an example
ENDS_WITH = 12  # of these lines, the last


@dataclass
class _Maker:
    """Makes one JSON Schema.

    Attributes:
        is_strict: True if the schema refuses fields that it does not name, as tests do. A program that reads documents
            must accept such fields: a later version may add some.
        definitions: the schemas of the objects inside the document, by name.
    """

    is_strict: bool = False
    definitions: dict[str, Schema] = field(default_factory=dict)

    def of_object(self, kind: Any) -> Schema:
        """Return the schema of a TypedDict."""
        # Reading the sources takes a second, and a test has no use for descriptions.
        texts = {} if self.is_strict else descriptions_of(kind)
        properties, required = {}, []
        for name, hint in get_type_hints(kind, include_extras=True).items():
            # `__required_keys__` is wrong in a module that does not evaluate its annotations.
            required += [] if get_origin(hint) is NotRequired else [name]
            hint, text = _without_marks(hint)
            properties[name] = self.of(hint)
            if not self.is_strict:
                properties[name]["description"] = text or texts[name]
        made: Schema = {"type": "object", "description": _text_of(kind), "properties": properties}
        made["required"] = required
        if self.is_strict:
            made["additionalProperties"] = False
        return made

    def of(self, hint: Any) -> Schema:
        """Return the schema of a type."""
        origin, inner = get_origin(hint), get_args(hint)
        if hint is Any:
            return {}
        if hint in PLAIN:
            return {"type": PLAIN[hint]}
        if origin is Literal:
            return {"enum": list(inner)}
        if origin in (Union, UnionType):
            return _either([self.of(each) for each in inner])
        if isinstance(hint, type) and issubclass(hint, Enum):
            return {"enum": [each.value for each in hint]}
        if origin is not None and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(inner[1])}
        if origin is not None and issubclass(origin, Sequence):
            return {"type": "array", "items": self.of(inner[0])}
        if hasattr(hint, "__required_keys__"):
            if hint.__name__ not in self.definitions:
                self.definitions[hint.__name__] = {}  # a type that contains itself ends here
                self.definitions[hint.__name__] = self.of_object(hint)
            return {"$ref": f"#/$defs/{hint.__name__}"}
        raise TypeError(f"{hint!r} has no JSON Schema. Use a TypedDict, a Literal or a plain type.")


def _either(schemas: Sequence[Schema]) -> Schema:
    """Return the schema of a value that fits one of several. A type that may be null stays on one line."""
    if all(set(each) == {"type"} for each in schemas):
        return {"type": [each["type"] for each in schemas]}
    if all(set(each) <= {"enum"} or each == {"type": "null"} for each in schemas):
        return {"enum": [value for each in schemas for value in each.get("enum", [None])]}
    return {"anyOf": list(schemas)}


def _without_marks(hint: Any) -> tuple[Any, str]:
    """Return a type without the marks of a TypedDict, and the description that an `Annotated` has."""
    text = ""
    while get_origin(hint) in (Annotated, NotRequired, Required):
        if get_origin(hint) is Annotated:
            text = hint.__metadata__[0]
            hint = hint.__origin__
        else:
            hint = get_args(hint)[0]
    return hint, text


def _text_of(kind: Any) -> str:
    return " ".join((kind.__doc__ or "").split())


def descriptions_of(kind: Any) -> dict[str, str]:
    """Return the description of each field of a TypedDict: the docstring below the field in the type or in its base.

    Args:
        kind: the type.
    """
    return _descriptions_in(api.definition_of(f"{kind.__module__}.{kind.__name__}"))


def _descriptions_in(definition: griffe.Object) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in definition.resolved_bases if isinstance(definition, griffe.Class) else ():
        found |= _descriptions_in(base.final_target if isinstance(base, griffe.Alias) else base)
    for name, member in definition.members.items():
        if isinstance(member, griffe.Attribute) and member.docstring is not None:
            found[name] = " ".join(member.docstring.value.split())
    return found


def load(kind: DocumentKind) -> Any:
    """Return the type of a document.

    Args:
        kind: the kind of the document.
    """
    module, _, name = kind.type.partition(":")
    return getattr(importlib.import_module(module), name)


def schema_of(kind: DocumentKind, *, is_strict: bool = False) -> Schema:
    """Return the JSON Schema of a document.

    Args:
        kind: the kind of the document.
        is_strict: True to refuse fields that the schema does not name. Default: they are accepted.
    """
    maker = _Maker(is_strict)
    made = maker.of_object(load(kind))
    given = made["properties"]
    properties = {"version": {"const": VERSION, "type": "integer", "description": VERSION_TEXT}, **given}
    if not kind.is_line:
        properties.setdefault("notes", {"type": "array", "items": {"type": "string"}, "description": NOTES_TEXT})
    whole = {"$schema": DIALECT, "title": kind.name, **made, "properties": properties}
    whole["required"] = ["version", *made["required"]]
    return {**whole, "$defs": maker.definitions} if maker.definitions else whole


def schema_text(kind: DocumentKind) -> str:
    """Return the JSON Schema of a document as text.

    Args:
        kind: the kind of the document.
    """
    return json.dumps(schema_of(kind), indent=1, ensure_ascii=False) + "\n"


# ------------------------------------------------------------------------------------------------ the page


def json_page() -> str:
    """Return the page about the JSON documents."""
    rows = [
        [f"[`{kind.name}`](#json-{kind.name})", _printed_by(kind), _text_of(load(kind)).rstrip(".")] for kind in KINDS
    ]
    blocks = [
        "# JSON documents",
        "With `--json`, a verb prints one document on stdout, and everything else on stderr. `events --json` prints a "
        "document on each line. Use these documents in scripts: texts for people change more often.",
        f"Each document has the field `version`, which is {VERSION}. A later release may add fields to a document, so "
        "ignore fields that you do not know. If a release removes a field of any document or changes its meaning, "
        "`version` rises, and the changelog names the field.",
        "Times are Unix times in seconds. A name that ends with `_s` has seconds. A share is a number from 0 to 1. "
        "JSON has no NaN and no infinity: null replaces them, and the field `notes` names the places.",
        table(("document", "printed by", "content"), rows),
    ]
    for kind in KINDS:
        blocks += _section(kind)
    return "\n\n".join(blocks) + "\n"


def _printed_by(kind: DocumentKind) -> str:
    return ", ".join(
        each if each.startswith("every") else f"[`{each}`](cli.md#replicas-{each.partition(' ')[0]})"
        for each in kind.printed_by
    )


def _section(kind: DocumentKind) -> Iterator[str]:
    schema = schema_of(kind)
    yield f"(json-{kind.name})=\n## `{kind.name}`"
    yield schema["description"]
    yield f"Printed by: {_printed_by(kind)}. JSON Schema: [{kind.name}.schema.json](../json/{kind.name}.schema.json)."
    yield table(("field", "type", "meaning"), list(_rows(schema, schema.get("$defs", {}))))
    for name, inner in schema.get("$defs", {}).items():
        yield f"**{name}:** {inner['description']}"
        yield table(("field", "type", "meaning"), list(_rows(inner, schema["$defs"])))
    if (example := example_of(kind)) is not None:
        yield f"````{{dropdown}} Example\n```text\n{_shortened(example)}\n```\n````"


def _rows(schema: Schema, definitions: Mapping[str, Schema]) -> Iterator[list[str]]:
    for name, each in schema["properties"].items():
        optional = "" if name in schema["required"] else ", may be absent"
        yield [code(name), type_name(each) + optional, each["description"]]


def type_name(schema: Schema) -> str:
    """Return a type in words: `integer or null`, `list of StackDump`.

    Args:
        schema: the JSON Schema of the type.
    """
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(type_name(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join("null" if each is None else code(str(each)) for each in schema["enum"])
    kind = schema.get("type", "any value")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {type_name(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object: {type_name(schema['additionalProperties'])} by name"
    return str(kind)


def example_of(kind: DocumentKind) -> str | None:
    """Return the example of a document, as a real call printed it. None if there is no example.

    Args:
        kind: the kind of the document.
    """
    path = EXAMPLES / f"{kind.name}.json"
    return path.read_text(encoding="utf-8").rstrip() if path.is_file() else None


def _shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= SHOWN_LINES:
        return text
    return "\n".join([*lines[: SHOWN_LINES - ENDS_WITH], "…", *lines[-ENDS_WITH:]])
