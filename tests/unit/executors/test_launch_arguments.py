"""Bad input is refused before anything is written or started, with an error that names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.third_party import PopenExecutor

from executors import LocalProcessExecutor, ReplicaHandle, attach, launch, list_runs
from executors.errors import (
    EntrypointArgumentsError,
    EntrypointError,
    EntrypointImportError,
    RunExistsError,
    RunNotFoundError,
    UnknownHandleError,
)
from executors.registry.placements import Placements

PLAIN = LocalProcessExecutor(preload=())


def nothing() -> None: ...


async def asynchronous() -> None: ...


@pytest.fixture
def nothing_written(state_home: Path) -> Iterator[None]:
    yield
    assert list_runs() == []
    written = [path for path in (state_home / "replicas").rglob("*") if path.is_file()]
    assert {path.parent.name for path in written} <= {".preparing"}, (
        "only the note of a launch that never started is written"
    )


@pytest.mark.usefixtures("nothing_written")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n": 0}, ValueError, "n must be at least 1, got n=0."),
        ({"n": -3}, ValueError, "n must be at least 1, got n=-3."),
        ({"n": 1.5}, TypeError, "n must be an integer, got n=1.5."),
        ({"secrets": "FOO"}, TypeError, "secrets must be a list of strings, as in ['FOO'], got a string."),
        ({"env": ["A"]}, TypeError, "env must map names to strings, as in {'STAGE': 'test'}, got ['A']."),
        ({"gpu": 5}, TypeError, "gpu must be the name of a GPU, as in 'H100' or 'H100:2', got 5."),
        ({"run_id": 5}, TypeError, "run_id must be a name, as in 'first-try', got 5."),
        ({"seed": "a"}, TypeError, "seed must be an integer, got 'a'."),
        ({"rendezvous": 5}, TypeError, "rendezvous must be the url of a store, or a directory, got 5."),
        ({"timeout": 0}, ValueError, "timeout must be more than 0 seconds, got timeout=0."),
        ({"timeout": -1}, ValueError, "got timeout=-1."),
        ({"run_id": "Not A Name"}, ValueError, "Bad run id 'Not A Name'"),
        ({"rendezvous": "memory://x"}, ValueError, "exists only in this process"),
        ({"rendezvous": "ftp://x/y"}, ValueError, "No store has the scheme 'ftp'"),
        ({"gpu": "H100:none"}, ValueError, "as in 'H100' or 'H100:2', got gpu='H100:none'"),
        ({"env": {"A": 1}}, ValueError, "env must map names to strings"),
        ({"env": {1: "A"}}, ValueError, "env must map names to strings"),
        ({"env": {"A B": "3"}}, ValueError, "env must have names of variables, as in {'STAGE': 'test'}, got 'A B'."),
        ({"secrets": ["NO_SUCH_SECRET_HERE"]}, ValueError, "The secret 'NO_SUCH_SECRET_HERE' is not set"),
        ({"args": {"x": 1}}, EntrypointArgumentsError, "unexpected keyword argument 'x'"),
        ({"args": {"rank_env": "not a name"}}, ValueError, "rank_env must be the name of an environment variable"),
        ({"entrypoint": "no/such/file.py"}, EntrypointImportError, "does not exist"),
        ({"entrypoint": "no_such_module:f"}, EntrypointImportError, "there is no module 'no_such_module'"),
        ({"entrypoint": "json:dumpz"}, EntrypointImportError, "Did you mean 'dump'?"),
        ({"entrypoint": "what is this"}, EntrypointError, "Use pkg.mod:function"),
        (
            {"entrypoint": asynchronous},
            EntrypointError,
            "is async: calling it runs nothing of it. Give a plain function",
        ),
        (
            {"entrypoint": "json:loads", "args": {"s": object()}},
            EntrypointArgumentsError,
            "argument 's' is an object. ",
        ),
        (
            {"entrypoint": "json:dump", "args": {"obj": [0, 1, {"y": 1j}], "fp": 1}},
            EntrypointArgumentsError,
            "argument 'obj[2].y' is a complex. Pass JSON values, or the function itself",
        ),
        (
            {"entrypoint": "json:dump", "args": {"obj": {1: 2}, "fp": 1}},
            EntrypointArgumentsError,
            "argument 'obj' has the key 1, an int; keys are strings.",
        ),
        ({"argv": ["--lr", "1"]}, ValueError, "need a file or module that is run as a script, as in "),
        ({"entrypoint": "json:dump", "argv": []}, ValueError, "as in 'train.py' or 'pkg.train', got 'json:dump'."),
        ({"entrypoint": "train.py", "argv": "--lr 1"}, TypeError, "argv must be a list of strings"),
        ({"entrypoint": "train.py", "argv": [], "args": {"a": 1}}, ValueError, "Give one of them: --arg, or options "),
        ({"entrypoint": "no_such.py", "argv": []}, EntrypointImportError, "does not exist"),
        ({"executor": "locla"}, LookupError, "Did you mean 'local'?"),
        ({"executor": PopenExecutor(), "env": {"A": "1"}}, ValueError, "'popen' takes no env="),
        (
            {"executor": PopenExecutor(), "restarts": 3},
            ValueError,
            "'popen' takes no restarts= (--restarts), hang_timeout=",
        ),
        (
            {"executor": PopenExecutor(), "hang_timeout": 60},
            ValueError,
            "'popen' takes no restarts= (--restarts), hang_timeout=",
        ),
        ({"restarts": -1}, ValueError, "must begin with a number, as in 3, 3/1h or 3,oom=0, got '-1'"),
        ({"restarts": True}, TypeError, "or a Restarts, got True"),
        ({"executor": PopenExecutor(), "start_timeout": 60}, ValueError, "start_timeout= (--start-timeout)"),
        (
            {"start_timeout": "soon"},
            ValueError,
            "start_timeout must be a duration of at least 0.001 s, as in 20m, or auto",
        ),
        ({"hang_timeout": "soon"}, ValueError, "hang_timeout must be SOFT, SOFT:HARD, auto or off"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_written(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {"executor": PLAIN, "entrypoint": nothing, "n": 1, **changes}
    with pytest.raises(error) as caught:
        launch(given.pop("executor"), given.pop("entrypoint"), given.pop("n"), **given)
    assert message in str(caught.value)


@pytest.mark.usefixtures("nothing_written")
def test_a_module_that_fails_to_import_is_refused_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_on_import.py").write_text("import os\nos.nope\ndef main(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EntrypointImportError, match=r"(?s)line 2.*has no attribute 'nope'"):
        launch(PLAIN, "fails_on_import:main", 1)


def test_a_taken_run_id_explains_how_to_attach() -> None:
    with launch(PLAIN, nothing, 1, run_id="mine") as run:
        run.wait(30)
    with pytest.raises(RunExistsError, match="attach"):
        launch(PLAIN, nothing, 1, run_id="mine")


@pytest.mark.parametrize("place", ["known here", "in the store alone"])
def test_a_taken_run_id_is_refused_before_the_code_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = tmp_path / "store"
    with launch(PLAIN, nothing, 1, run_id="mine", rendezvous=store) as run:
        run.wait(30)
    if place == "in the store alone":  # as after a launch on another machine
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    packed = list[object]()
    monkeypatch.setattr(Placements, "package", lambda _, entrypoint: packed.append(entrypoint))
    with pytest.raises(RunExistsError, match="attach"):
        launch(PLAIN, nothing, 1, run_id="mine", rendezvous=store)
    assert packed == []


def test_an_unknown_run_explains_how_to_name_one_elsewhere_and_the_nearest_here() -> None:
    with launch(PLAIN, nothing, 1, run_id="brave-otter") as run:
        run.wait(30)
    with pytest.raises(RunNotFoundError, match=r"No run 'brave-oter' is known.*Did you mean 'brave-otter'\?.*s3://"):
        attach("brave-oter")


def test_a_handle_that_was_never_launched_names_run_rank_and_store(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    handle = ReplicaHandle(0, "local", {"run_id": "never-was", "store_url": url, "attempt": 0})
    for verb in (PLAIN.poll, PLAIN.stream_logs, PLAIN.cancel, lambda handle: PLAIN.collect([handle])):
        with pytest.raises(UnknownHandleError) as caught:
            verb(handle)
        assert str(caught.value) == f"No replica with run_id='never-was', rank 0 at {url}."


def test_a_rank_that_the_run_does_not_have_is_refused() -> None:
    with launch(PLAIN, nothing, 2) as run:
        run.wait(30)
        for verb in (run.logs, run.cancel, run.artifacts):
            with pytest.raises(ValueError, match="has no rank 2, but ranks 0-1"):
                verb(rank=2)
