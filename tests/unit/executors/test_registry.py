"""Tests how the name of a backend leads to an executor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.third_party import PopenExecutor

from executors import LocalProcessExecutor, launch
from executors.backend import Backend
from executors.errors import BackendError, UnknownBackendError
from executors.registry import (
    BUILT_IN,
    check_executor,
    describe_executor,
    executor_class,
    executor_of_record,
    get_executor,
    import_path,
    known_backends,
)
from executors.task.record import Placement


def test_a_backend_is_found_by_its_name() -> None:
    assert executor_class("local") is LocalProcessExecutor


def test_a_backend_is_found_by_its_class() -> None:
    assert executor_class("support.third_party:PopenExecutor") is PopenExecutor


def test_a_class_is_found_again_by_the_path_that_a_run_records() -> None:
    assert executor_class(import_path(PopenExecutor())) is PopenExecutor


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry_point: str) -> None:
    """Install a package that registers a backend, as pip does."""
    metadata = folder / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[replicas.backends]\n{entry_point}\n")
    monkeypatch.syspath_prepend(folder)


def test_the_backends_of_installed_packages_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "popen = support.third_party:PopenExecutor")
    assert known_backends()["popen"] == "support.third_party:PopenExecutor"
    assert isinstance(get_executor("popen"), PopenExecutor)


def test_a_backend_whose_runs_could_not_be_followed_by_its_registered_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "p-open = support.third_party:PopenExecutor")
    with pytest.raises(
        BackendError, match=r"registered as 'p-open', and the backend_name of .*PopenExecutor, is 'popen'"
    ):
        launch("p-open", print, 1)
    assert isinstance(get_executor("support.third_party:PopenExecutor"), PopenExecutor)


def test_the_error_for_a_misspelled_backend_names_the_nearest_one_and_all() -> None:
    with pytest.raises(UnknownBackendError) as caught:
        executor_class("locla")
    known = ", ".join(sorted(BUILT_IN))
    assert str(caught.value) == f"No backend named 'locla'. Did you mean 'local'? Known: {known}."
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize(
    "path", ["no_such_module:X", "support.third_party:Nope", "support.third_party:CALL", ":X", ".x:Y"]
)
def test_a_path_that_leads_to_no_class_is_refused_by_name(path: str) -> None:
    with pytest.raises(BackendError, match=path):
        executor_class(path)


def test_options_reach_the_constructor() -> None:
    executor = get_executor("local", {"max_parallel": 3, "preload": []})
    assert isinstance(executor, LocalProcessExecutor)
    assert (executor.max_parallel, executor.preload) == (3, ())


def test_the_error_for_a_misspelled_option_names_the_nearest_one_and_all() -> None:
    with pytest.raises(
        ValueError, match=r"'max_paralel'. Did you mean 'max_parallel'\? Its options: gpus, max_parallel"
    ):
        get_executor("local", {"max_paralel": 3})


def test_an_object_that_lacks_a_verb_is_refused_and_the_verb_is_named() -> None:
    class Half:
        backend_name = "half"

        def poll(self, handle: object) -> str:
            return "running"

    lacking = "Half is not a ServerlessExecutor: it lacks launch_replicas, stream_logs, cancel"
    with pytest.raises(TypeError, match=lacking):
        check_executor(Half())
    with pytest.raises(TypeError, match="supports_inter_replica_network"):
        launch(Half(), print, 1)  # type: ignore[arg-type]


def test_a_class_in_the_place_of_an_executor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Give an executor, as in LocalProcessExecutor\(\)\."):
        launch(LocalProcessExecutor, print, 1)  # type: ignore[arg-type]


# From a record


class Remote(PopenExecutor):
    """A registered backend, whose options a record may name in part."""

    backend_name = "remote"
    recordable_options: ClassVar[dict[str, Any]] = {"site": re.compile("[a-z]+"), "size": int}

    def __init__(self, site: str | None = None, size: int = 1, image: str | None = None) -> None:
        super().__init__()
        self.options_to_keep = {"site": site, "size": size, "image": image}


def record_of(executor: str, **options: Any) -> Placement:
    return Placement(backend=executor, ranks=(0,), executor_options=options)


def test_a_registered_backend_is_made_with_the_options_that_may_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "remote = test_registry:Remote")
    assert describe_executor(Remote("north", 2, "python")) == {
        "backend": "remote",
        "executor": None,
        "executor_options": {"site": "north", "size": 2},
        "unrecorded_options": ("image",),
    }
    made: Any = executor_of_record(record_of("remote", site="north", size=2))
    assert made.options_to_keep == {"site": "north", "size": 2, "image": None}
    refused: list[dict[str, Any]] = [{"image": "evil"}, {"site": "../x"}, {"size": True}, {"size": "2"}, {"args": []}]
    for bad in refused:
        with pytest.raises(BackendError, match=r"not taken from a record\. Options that are: site, size"):
            executor_of_record(record_of("remote", **bad))
    noted: Any = executor_of_record(record_of("remote"), options={"image": "mine"})
    assert noted.options_to_keep["image"] == "mine"


def test_a_class_that_is_not_registered_is_named_in_the_record_and_not_taken_from_it() -> None:
    assert describe_executor(Remote())["executor"] == "test_registry:Remote"
    assert describe_executor(LocalProcessExecutor())["executor"] is None
    with pytest.raises(BackendError, match=r"'remote', which is not known here\. Known: hf, inline, "):
        executor_of_record(record_of("remote"))
    assert isinstance(executor_of_record(record_of("remote"), named="test_registry:Remote"), Remote)
    with pytest.raises(BackendError, match="launched on the backend 'remote'; LocalProcessExecutor is of"):
        executor_of_record(record_of("remote"), named="local", options={"site": "north"})


def test_a_class_without_the_verbs_is_never_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "popen = subprocess:Popen")
    with pytest.raises(
        BackendError, match="is not an executor: it lacks launch_replicas, stream_logs, cancel, collect"
    ):
        executor_of_record(record_of("popen"), options={"args": ["touch", str(tmp_path / "ran")]})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_an_executor_of_this_project_has_all_that_launch_uses_of_one(name: str) -> None:
    cls = executor_class(name)
    assert issubclass(cls, Backend)
    assert cls.__abstractmethods__ == frozenset()
