"""From a backend's name to an executor."""

from __future__ import annotations

from pathlib import Path

import pytest
from strangers_executor import PopenExecutor

from executors import LocalProcessExecutor, launch
from executors.errors import BackendError, UnknownBackendError
from executors.registry import check_executor, executor_class, get_executor, import_path, known_backends


def test_a_backend_is_found_by_its_name() -> None:
    assert executor_class("local") is LocalProcessExecutor


def test_a_backend_is_found_by_its_class() -> None:
    assert executor_class("strangers_executor:PopenExecutor") is PopenExecutor


def test_a_class_is_found_again_by_the_path_that_a_run_records() -> None:
    assert executor_class(import_path(PopenExecutor())) is PopenExecutor


def test_the_backends_of_installed_packages_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[replicas.backends]\ntheirs = strangers_executor:PopenExecutor\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert known_backends()["theirs"] == "strangers_executor:PopenExecutor"
    assert isinstance(get_executor("theirs"), PopenExecutor)


def test_a_misspelt_backend_is_told_the_nearest_and_all() -> None:
    with pytest.raises(UnknownBackendError) as caught:
        executor_class("locla")
    assert str(caught.value) == "No backend named 'locla'. Did you mean 'local'? Known: hf, local, modal."
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("path", ["no_such_module:X", "strangers_executor:Nope", "strangers_executor:CALL"])
def test_a_path_that_leads_to_no_class_is_refused_by_name(path: str) -> None:
    with pytest.raises(BackendError, match=path):
        executor_class(path)


def test_options_reach_the_constructor() -> None:
    executor = get_executor("local", {"max_parallel": 3, "preload": []})
    assert isinstance(executor, LocalProcessExecutor)
    assert (executor.max_parallel, executor.preload) == (3, ())


def test_a_misspelt_option_is_told_the_nearest_and_all() -> None:
    with pytest.raises(
        ValueError, match=r"'max_paralel'. Did you mean 'max_parallel'\? Its options: gpus, max_parallel"
    ):
        get_executor("local", {"max_paralel": 3})


def test_an_object_that_lacks_a_verb_is_refused_and_the_verb_is_named() -> None:
    class Half:
        backend_name = "half"

        def poll(self, handle: object) -> str:
            return "running"

    with pytest.raises(TypeError, match="Half is no ServerlessExecutor: it lacks launch_replicas, stream_logs, cancel"):
        check_executor(Half())
    with pytest.raises(TypeError, match="supports_inter_replica_network"):
        launch(Half(), print, 1)  # type: ignore[arg-type]
