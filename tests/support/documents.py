"""Checks a JSON document of the command against its schema."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema

from docs.generate.json_documents import schema_of
from executors.cli.documents import KINDS


@cache
def validator_of(name: str) -> jsonschema.Draft202012Validator:
    """Return the validator of a kind of document. It refuses fields that the schema does not name."""
    (kind,) = [kind for kind in KINDS if kind.name == name]
    return jsonschema.Draft202012Validator(schema_of(kind, is_strict=True))


def kinds_of(verb: str) -> list[str]:
    """Return the kinds of documents that a verb may print."""
    return [kind.name for kind in KINDS if any(each.partition(" ")[0] == verb for each in kind.printed_by)]


def problems_of(name: str, document: Any) -> list[str]:
    """Return the fields of a document that its schema refuses."""
    return [f"{error.json_path}: {error.message[:300]}" for error in validator_of(name).iter_errors(document)]


def check_document(verb: str, document: Any) -> str:
    """Return the kind of a document that a verb printed. It fails if the document fits none of the verb's kinds."""
    found = {name: problems_of(name, document) for name in [*kinds_of(verb), "error"]}
    fits = [name for name, problems in found.items() if not problems]
    closest = min(found.items(), key=lambda each: len(each[1]))
    assert fits, f"`{verb} --json` printed no document of the reference. As {closest[0]!r}: {closest[1][:5]}"
    return fits[0]
