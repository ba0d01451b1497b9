"""Each document that a verb prints with --json has a version, a schema, and a section in the reference."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from support.cli import Folder, HereInstead
from support.documents import check_document, kinds_of, problems_of
from support.json_scene import Scene, calls

from docs.generate.json_documents import EXAMPLES, json_page, schema_of
from executors.cli import command_of
from executors.cli.documents import KINDS, VERSION


def test_each_verb_with_the_option_json_has_a_document() -> None:
    verbs = {name for name, verb in command_of().commands.items() if any("--json" in each.opts for each in verb.params)}
    assert {name for name in verbs if not kinds_of(name)} == set()


def test_each_field_of_each_document_has_a_description() -> None:
    missing = []
    for kind in KINDS:
        schema = schema_of(kind)
        jsonschema.Draft202012Validator.check_schema(schema)
        for name, part in {kind.name: schema, **schema.get("$defs", {})}.items():
            missing += [f"{name}.{field}" for field, each in part["properties"].items() if not each.get("description")]
    assert not missing


def test_each_example_of_the_reference_is_as_its_schema_says() -> None:
    found = {path.stem: json.loads(path.read_text()) for path in EXAMPLES.glob("*.json") if ".schema" not in path.name}
    assert found.keys() == {kind.name for kind in KINDS}
    assert {name: problems for name, each in found.items() if (problems := problems_of(name, each))} == {}


def test_a_published_schema_accepts_a_field_of_a_later_release() -> None:
    kind = next(kind for kind in KINDS if kind.name == "rm")
    later = {"version": VERSION, "runs": [{"run": "x", "removed": True, "problem": None, "new": 1}], "more": 2}
    jsonschema.validate(later, schema_of(kind))
    assert problems_of("rm", later)


def test_the_page_has_a_section_for_each_document() -> None:
    page = json_page()
    assert [kind.name for kind in KINDS if f"(json-{kind.name})=" not in page] == []


def test_the_document_of_a_failed_call_has_the_version_and_the_exit_code(here: HereInstead) -> None:
    told = here.replicas("status", "never-was", "--json")
    assert told.json["version"] == VERSION
    assert (told.code, told.json["exit_code"], told.json["kind"]) == (2, 2, "RunNotFoundError")
    told = here.replicas("status", "--json")
    assert told.json["exit_code"] == told.code == 2


def test_documents_of_a_run_that_fails_or_waits_are_as_their_schemas_say(folder: Folder, here: HereInstead) -> None:
    assert check_document("ls", here.replicas("ls", "--json").json) == "ls"
    failed = here.launch("job:fail", "--args-are-unknown", "--json")
    assert check_document("launch", failed.json) == "error"
    ended = here.replicas(
        "launch", "job:fail", "--arg", "ranks=[0]", "--backend", "inline", "--n", 1, "--run-id", "one", "--json"
    )
    assert (check_document("launch", ended.json), ended.json["exit_code"]) == ("run", 1)
    for verb in ("status", "report", "wait", "collect", "logs", "cancel"):
        assert here.replicas(verb, "one", "--json").json["version"] == VERSION


@pytest.mark.parametrize("verb", ["status", "report", "wait", "ls"])
def test_a_run_whose_backend_is_not_installed_is_described(verb: str, folder: Folder, here: HereInstead) -> None:
    (folder.path / "own.py").write_text(
        "from executors import InlineExecutor\n\nclass Own(InlineExecutor):\n    pass\n"
    )
    here.replicas("launch", "job:main", "--backend", "own:Own", "--n", 1, "--run-id", "one")
    (folder.path / "own.py").unlink()
    told = here.replicas(verb, *(["one"] if verb != "ls" else []), "--json")
    assert told.json["version"] == VERSION


@pytest.mark.timeout(600)
def test_each_document_of_the_scene_is_as_its_schema_says(tmp_path: Path) -> None:
    """The test calls each verb in a separate process, so it runs at night."""
    wrong = {}
    for kind, verb, document in calls(Scene(tmp_path)):
        if problems := problems_of(kind, document):
            wrong[kind, verb] = problems
    assert not wrong
