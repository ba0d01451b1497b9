"""Tests properties of all errors: their messages, and that they can be pickled."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import diloco.errors  # noqa: F401 - its errors are among those below
from executors.backends.jobs.service import JobServiceError
from executors.errors import ReplicasError, did_you_mean, install_command, raise_missing_package, unknown_name


def kinds(base: type[ReplicasError]) -> Iterator[type[ReplicasError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def test_every_error_comes_back_from_a_pickle_with_its_fields_and_notes() -> None:
    errors: list[ReplicasError] = [JobServiceError("what happened", "rejected", retry_after_s=3.0)]
    for kind in {*kinds(ReplicasError)}:
        if kind.__module__ in ("executors.errors", "diloco.errors"):
            parameters = inspect.signature(kind.__init__).parameters.values()
            given: Any = {each.name: (3, 4) for each in parameters if each.kind is each.KEYWORD_ONLY}
            errors.append(kind("what happened", **given))
    for error in errors:
        error.add_note("a note")
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), vars(back)) == (type(error), "what happened", vars(error))


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known_ones() -> None:
    assert unknown_name("backend", "modla", ["modal", "hf"]) == (
        "No backend 'modla'. Did you mean 'modal'? Known: hf, modal."
    )
    assert unknown_name("option", "x", []) == "No option 'x'. Known: none."
    assert did_you_mean("nothing like it", ["modal", "hf"]) == ""


WITHOUT_PACKAGES = """
import importlib, sys
sys.modules |= dict.fromkeys(("torch", "lightning", "transformers"))  # None: as if none of them were installed
from executors.errors import MissingDependencyError
for name in ("diloco.demo", "diloco.trainers.hf", "diloco.trainers.lightning"):
    try:
        importlib.import_module(name)
    except MissingDependencyError as error:
        print(error)
"""


def test_a_module_of_ours_that_needs_an_extra_names_the_command_that_installs_it() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PACKAGES], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{what} needs the package {package!r}. Install all that it needs with: {install_command(extra)}"
        for what, package, extra in (
            ("The demo", "torch", "diloco"),
            ("diloco.trainers.hf", "torch", "hf-trainer"),
            ("diloco.trainers.lightning", "lightning", "lightning"),
        )
    ]


def test_a_missing_module_that_no_extra_brings_stays_the_error_of_the_import() -> None:
    for error in (ModuleNotFoundError("no", name="torchx"), ImportError("half of torch is missing", name="torch")):
        with pytest.raises(ImportError) as raised:
            raise_missing_package("The demo", error, "diloco")
        assert raised.value is error
