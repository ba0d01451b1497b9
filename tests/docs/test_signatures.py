"""Public signatures show nothing internal, and the reference describes every parameter."""

from __future__ import annotations

import importlib
import inspect
import logging
import pydoc
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import griffe

import diloco
import executors
from diloco import RoundReport
from docs.generate import api
from docs.generate.pages import PAGES
from docs.generate.surface import MODULES

SEE = re.compile(r"\b[Ss]ee (?:also )?`([A-Za-z_][\w.]*)`")
NAMED = re.compile(r"`([A-Za-z_][\w.]*)`")


@cache
def public() -> tuple[api.Part, ...]:
    """Return all public functions, classes, methods and properties."""
    return tuple(each for module in MODULES for part in api.parts_of(module) for each in with_members(part))


def with_members(part: api.Part) -> Iterator[api.Part]:
    """Yield an object, and its public members if the reference has a section for each."""
    yield part
    if part.definition.is_class and not api.backend_of(part.definition):
        for name, member in api.public_members(part.definition):
            yield from with_members(api.Part(f"{part.path}.{name}", member))


def all_parameters(part: api.Part) -> list[griffe.Parameter]:
    """Return the parameters of an object, private ones included."""
    here: Any = part.definition
    if here.is_class:
        here = here.all_members.get("__init__")
        here = here.final_target if isinstance(here, griffe.Alias) else here
    return [] if here is None or not here.is_function else [p for p in here.parameters if p.name not in ("self", "cls")]


def object_of(part: api.Part) -> Any:
    """Return the object itself, as users import it."""
    module = max((each.path for each in MODULES if part.path.startswith(f"{each.path}.")), key=len)
    found: Any = importlib.import_module(module)
    for name in part.path.removeprefix(f"{module}.").split("."):
        # A property of a class stays a property. A module may import its names when they are first used.
        found = getattr(found, name) if inspect.ismodule(found) else inspect.getattr_static(found, name)
    return found


def test_no_public_signature_has_a_private_parameter() -> None:
    assert [f"{each.path}({p.name})" for each in public() for p in all_parameters(each) if p.name.startswith("_")] == []


def functions_as_defaults(part: api.Part) -> list[str]:
    """Return the parameters of an object whose default is a function."""
    itself = object_of(part)
    itself = getattr(itself, "__func__", itself)
    if not inspect.isfunction(itself) and not (inspect.isclass(itself) and "__init__" in vars(itself)):
        return []
    defaults = {p.name: p.default for p in inspect.signature(itself).parameters.values()}
    return [f"{part.path}({name})" for name, value in defaults.items() if inspect.isroutine(value)]


def test_no_public_signature_shows_a_function_as_a_default() -> None:
    """The help would show its address, or the name of something that users cannot import."""
    here = [each for each in public() if not each.path.startswith("diloco.trainers.")]
    assert [name for each in here for name in functions_as_defaults(each)] == []


def test_no_callback_of_a_trainer_shows_a_function_as_a_default() -> None:
    """The test imports both trainers, which takes seconds, so it runs at night."""
    here = [each for each in public() if each.path.startswith("diloco.trainers.")]
    assert here
    assert [name for each in here for name in functions_as_defaults(each)] == []


def test_options_of_any_name_are_described_by_the_name_of_the_function_that_takes_them() -> None:
    found = []
    for each in public():
        for p in all_parameters(each):
            if p.kind is griffe.ParameterKind.var_keyword and str(p.annotation) == "Any":
                named = NAMED.findall(api.descriptions_of(each.definition).get(p.name, ""))
                found += [] if any(is_known(name, each) for name in named) else [f"{each.path}(**{p.name})"]
    assert found == []


def test_each_name_that_a_public_docstring_refers_to_can_be_imported() -> None:
    wrong = []
    for each in public():
        text = each.definition.docstring.value if each.definition.docstring else ""
        wrong += [f"{each.path}: see {name}" for name in SEE.findall(text) if not is_known(name, each)]
    assert wrong == []


def is_known(name: str, part: api.Part) -> bool:
    """Return True if a reader of the object's docstring can import the name, or finds it in the same class or call."""
    owner = part.path.rpartition(".")[0]
    if name in {p.name for p in all_parameters(part)}:
        return True
    places = (name, f"{part.path}.{name}", f"{owner}.{name}", f"executors.{name}", f"diloco.{name}")
    return any(pydoc.locate(place) is not None for place in (*places, f"{part.definition.module.path}.{name}"))


def test_each_public_parameter_has_a_description() -> None:
    missing = []
    for each in public():
        described = api.descriptions_of(each.definition)
        missing += [f"{each.path}({p.name})" for p in api.parameters_of(each.definition) if not described.get(p.name)]
    assert missing == []


def test_the_tables_of_the_reference_have_no_empty_meaning() -> None:
    empty = []
    for name in ("reference/executors.md", "reference/diloco.md", "reference/trainers.md", "reference/testing.md"):
        rows = [line for line in PAGES[name]().splitlines() if line.startswith("| `")]
        empty += [f"{name}: {row}" for row in rows if row.endswith("|  |")]
    assert empty == []


def test_griffe_finds_nothing_wrong_in_any_public_docstring() -> None:
    for each in public():
        list(api.section_of(each, 2, {}))
    assert api.WARNINGS == []


def test_a_parameter_that_a_docstring_invents_would_be_found() -> None:
    api.package("executors")  # this adds the collector
    before = len(api.WARNINGS)
    code = griffe.Function("shown", parameters=griffe.Parameters(), lineno=1)
    code.docstring = griffe.Docstring("Do it.\n\nArgs:\n    invented: a value.", parent=code, lineno=1)
    code.docstring.parse("google")
    found = api.WARNINGS[before:]
    del api.WARNINGS[before:]
    assert any("invented" in each for each in found)
    assert logging.getLogger("griffe").level <= logging.WARNING


def test_help_describes_each_field_of_a_round_report() -> None:
    text = re.sub(".\b", "", pydoc.render_doc(RoundReport))  # bold letters are written twice
    fields = RoundReport.__dataclass_fields__
    assert [name for name in fields if not re.search(rf"^ \|\s+{name}: \S", text, re.M)] == []


def test_the_rules_look_at_every_exported_name() -> None:
    paths = {each.path for each in public()}
    names = {*(f"executors.{name}" for name in executors.__all__), *(f"diloco.{name}" for name in diloco.__all__)}
    assert names - paths == set()
    assert "executors.Run.add" in paths
    assert "diloco.trainers.hf.DiLoCoCallback" in paths
