"""Tests the accepted forms of entrypoints, and the errors for others."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from executors.errors import EntrypointArgumentsError, EntrypointError, EntrypointImportError
from executors.task.arguments import check_call
from executors.task.entrypoint import (
    argv_of,
    check_entrypoint,
    describe,
    load_entrypoint,
    parse_entrypoint,
    prepare_entrypoint,
    runs_as_script,
)

TRAIN = """
print("imported")
def main(steps=1): return ("main", steps)
def train(lr, *, epochs=2): return ("train", lr, epochs)
def anything(**kwargs): return kwargs
def positional(a=1, b=2, /, c=3, d=4): return c
not_a_function = 3
class Trainer:
    def __init__(self, lr): ...
async def fetch(): ...
also_async = fetch
if __name__ == "__main__":
    raise SystemExit("never run as a script")
"""

SCRIPT = """
import sys
import neighbour_of_user
def train(): return sys.argv
if __name__ == "__main__":
    print(*train())
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package and a script, on sys.path as the command puts it there."""
    folder = tmp_path / "work space"
    (folder / "pkg_of_user" / "sub").mkdir(parents=True)
    (folder / "pkg_of_user" / "__init__.py").write_text("raise RuntimeError('checks must not run this')")
    (folder / "pkg_of_user" / "trainer.py").write_text(TRAIN)
    (folder / "plain_of_user.py").write_text(TRAIN)
    (folder / "scripts").mkdir()
    (folder / "scripts" / "train_of_user.py").write_text("import neighbour_of_user\n" + TRAIN)
    (folder / "scripts" / "neighbour_of_user.py").write_text("")
    (folder / "scripts" / "script_of_user.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder


@pytest.mark.parametrize(
    ("text", "module", "function"),
    [
        ("pkg.mod:f", "pkg.mod", "f"),
        ("pkg.mod.f", "pkg.mod.f", None),
        ("mod", "mod", None),
        ("path/file.py:f", "file", "f"),
        ("path/file.py", "file", "main"),
        ("file.py", "file", "main"),
    ],
)
def test_each_form_is_taken_apart(text: str, module: str, function: str | None) -> None:
    name = parse_entrypoint(text)
    assert (name.module, name.function) == (module, function)


@pytest.mark.parametrize("text", ["", "a b", "mod:", "mod:f()", "path/file.txt:f", "1mod.f", "file.py:", "file.py:f.g"])
def test_any_other_form_is_refused_and_the_four_are_named(text: str) -> None:
    with pytest.raises(EntrypointError, match=r"(?s)Bad entrypoint.*\.py"):
        parse_entrypoint(text)


@pytest.mark.parametrize(
    ("text", "args", "result"),
    [
        ("plain_of_user", {}, ("main", 1)),
        ("plain_of_user:train", {"lr": 1}, ("train", 1, 2)),
        ("plain_of_user.train", {"lr": 1}, ("train", 1, 2)),
        ("scripts/train_of_user.py", {"steps": 5}, ("main", 5)),
        ("scripts/train_of_user.py:train", {"lr": 1}, ("train", 1, 2)),
    ],
)
@pytest.mark.usefixtures("workspace")
def test_a_checked_callable_can_be_loaded_and_called(text: str, args: dict[str, int], result: object) -> None:
    check_entrypoint(text, args)
    assert load_entrypoint(text)(**args) == result


def test_a_module_wins_over_a_function_of_the_same_name(workspace: Path) -> None:
    (workspace / "both_of_user").mkdir()
    (workspace / "both_of_user" / "__init__.py").write_text("def inner(): return 'function'")
    (workspace / "both_of_user" / "inner.py").write_text("def main(): return 'module'")
    assert load_entrypoint("both_of_user.inner")() == "module"


def test_a_module_that_only_a_finder_of_its_own_finds_is_found_without_running_it(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = workspace / "project" / "editable_of_user"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("print('imported')")
    (package / "sub" / "trainer.py").write_text(TRAIN)

    class Finder:
        """A finder like the one that setuptools installs for `pip install -e`."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, package / "__init__.py") if name == package.name else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    check_entrypoint("editable_of_user.sub.trainer:main", {"steps": 3})
    with pytest.raises(EntrypointImportError, match=r"no module 'editable_of_user\.sub\.other'"):
        check_entrypoint("editable_of_user.sub.other:main", {})
    assert capsys.readouterr().out == ""
    assert load_entrypoint("editable_of_user.sub.trainer.main")(steps=3) == ("main", 3)


@pytest.mark.usefixtures("workspace")
def test_checking_runs_nothing_of_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    check_entrypoint("pkg_of_user.trainer:train", {"lr": 1})  # an import of its package would raise an error
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "args", "error", "message"),
    [
        ("scripts/nope.py", {}, EntrypointImportError, "does not exist"),
        ("nope_of_user:f", {}, EntrypointImportError, "there is no module 'nope_of_user'"),
        ("plain_of_user:trian", {}, EntrypointImportError, "'trian' does not exist in it. Did you mean 'train'?"),
        ("plain_of_user:train", {}, EntrypointArgumentsError, "train() needs the argument 'lr'"),
        ("plain_of_user:train", {"lr": 1, "epoch": 1}, EntrypointArgumentsError, "Did you mean 'epochs'?"),
        (
            "plain_of_user:train",
            {"epoch": 1},
            EntrypointArgumentsError,
            "takes no argument 'epoch'. Did you mean 'epochs'? It needs the argument 'lr'. Give it with --arg lr=…",
        ),
        ("scripts/nope.py:__main__", {}, EntrypointImportError, "Entrypoint 'scripts/nope.py': the file "),
        (
            "plain_of_user.main",
            {"step": 1},
            EntrypointArgumentsError,
            "takes no argument 'step'. Did you mean 'steps'?",
        ),
        ("plain_of_user:fetch", {}, EntrypointError, "fetch() is async: calling it runs nothing of it. Give a plain "),
        ("plain_of_user:also_async", {}, EntrypointError, "also_async() is async"),
        (
            "scripts/script_of_user.py:__main__",
            {"lr": 1},
            EntrypointArgumentsError,
            "runs as a script, which takes no argument 'lr'. Give its options after --",
        ),
    ],
)
@pytest.mark.usefixtures("workspace")
def test_a_mistake_is_named_with_the_remedy(
    text: str, args: dict[str, int], error: type[EntrypointError], message: str
) -> None:
    with pytest.raises(error) as caught:
        check_entrypoint(text, args)
    assert message in str(caught.value)


@pytest.mark.usefixtures("workspace")
def test_arguments_that_a_function_takes_in_any_form_pass() -> None:
    check_entrypoint("plain_of_user:anything", {"whatever": 1})
    check_entrypoint("plain_of_user:Trainer", {"lr": 1})
    check_entrypoint("plain_of_user:positional", {"d": 1})


def test_a_syntax_error_is_named_with_its_line(workspace: Path) -> None:
    (workspace / "broken_of_user.py").write_text("x = 1\ndef main(:\n")
    with pytest.raises(EntrypointImportError, match="line 2"):
        check_entrypoint("broken_of_user.py", {})


def test_a_file_whose_name_is_taken_by_another_module_is_refused(workspace: Path) -> None:
    (workspace / "json.py").write_text("def main(): ...")
    with pytest.raises(EntrypointImportError, match="another module"):
        load_entrypoint("json.py")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plain_of_user:not_a_function", "'not_a_function' in 'plain_of_user' is an int, not a function."),
        ("os.path", "'path' in 'os' is a module, not a function."),
    ],
)
@pytest.mark.usefixtures("workspace")
def test_an_object_that_is_not_a_function_is_refused_with_its_kind(text: str, message: str) -> None:
    with pytest.raises(EntrypointImportError) as caught:
        load_entrypoint(text)
    assert message in str(caught.value)
    assert "fspath" not in str(caught.value)


async def asynchronous() -> None: ...


class Asynchronous:
    async def __call__(self) -> None: ...


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    "function", [asynchronous, functools.partial(asynchronous), Asynchronous(), functools.wraps(generator)(generator)]
)
def test_a_function_that_runs_nothing_when_it_is_called_is_refused(function: Any) -> None:
    with pytest.raises(EntrypointError, match=r"f is (async|a generator): calling it runs nothing of it. Give a plain"):
        check_call(function, {}, "f")


class Holder:
    def __init__(self, key: str) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"Holder({self.key})"

    def __call__(self) -> str:
        return self.key


@pytest.mark.parametrize(
    ("entrypoint", "name"),
    [
        (
            functools.partial(functools.partial(check_call, what="a secret"), args={}),
            "executors.task.arguments.check_call",
        ),
        (functools.partial(Holder("a secret").__call__), f"{__name__}.Holder.__call__"),
        (functools.partial(Holder("a secret")), f"{__name__}.Holder"),
        (Holder("a secret"), f"{__name__}.Holder"),
        (Holder, f"{__name__}.Holder"),
    ],
)
def test_the_name_of_an_entrypoint_is_the_same_in_each_process_and_holds_no_values(entrypoint: Any, name: str) -> None:
    assert describe(entrypoint) == name


def test_a_lambda_and_a_decorated_function_pass() -> None:
    check_call(lambda x: x, {"x": 1}, "f")
    check_call(functools.cache(lambda x: x), {"x": 1}, "f")


GUARD = "\nif __name__ == '__main__':\n    "
CALLED = {
    "its main takes nothing, and there is no guard": "def main(): ...",
    "its main has defaults, and there is no guard": "def main(steps=1): ...",
    "its main needs arguments, and there is no guard": "def main(steps): ...",
    "the guard calls main": f"def main(steps=1): ...{GUARD}main()",
    "the guard prints what main returns": f"def main(): ...{GUARD}print(main())",
    "the guard keeps what main returns": f"def main(): ...{GUARD}result = main()",
    "main is decorated, and the guard calls it": f"@record\ndef main(): ...{GUARD}main()",
    "main is imported, and the guard calls it": f"from elsewhere import main{GUARD}main()",
}
RUN = {
    "there is no main": "print(1)",
    "the guard parses options for main": f"def main(args): ...{GUARD}main(parser.parse_args())",
    "the guard sets something up before": f"def main(): ...{GUARD}torch.manual_seed(0)\n    main()",
    "the guard makes an exit code of what main returns": f"def main(): ...{GUARD}sys.exit(main())",
    "the guard gives main arguments": f"def main(steps=1): ...{GUARD}main(steps=3)",
    "the guard hands main to fire": f"def main(lr=0.1): ...{GUARD}fire.Fire(main)",
    "the guard hands main to typer": f"def main(lr: float = 0.1): ...{GUARD}typer.run(main)",
    "the guard spawns processes": f"def main(rank, size): ...{GUARD}mp.spawn(main, nprocs=2)",
    "hydra fills the parameters of main": f"@hydra.main(config_path='conf')\ndef main(cfg): ...{GUARD}main()",
    "click fills the parameters of main": f"@click.command()\n@click.option('--lr')\ndef main(lr): ...{GUARD}main()",
    "main is a command of typer": f"@app.command()\ndef main(lr: float = 0.1): ...{GUARD}app()",
    "main is async": f"async def main(): ...{GUARD}asyncio.run(main())",
    "the guard is written the other way round": "def main(): ...\nif '__main__' == __name__:\n    go(main())",
    "loading the file calls main": "def main(): ...\nmain()",
    "loading the file hands main to fire": "def main(): ...\nfire.Fire(main)",
    "loading the file keeps what main returns": "def main(): ...\nresult = main()",
    "loading the file calls main if a condition holds": "def main(): ...\nif DEBUG:\n    main()",
}


@pytest.mark.parametrize("source", CALLED.values(), ids=CALLED.keys())
def test_main_is_called_if_python_would_do_no_more(workspace: Path, source: str) -> None:
    (workspace / "rule_of_user.py").write_text(source)
    for text in ("rule_of_user.py", "rule_of_user"):
        assert not runs_as_script(text), text
        assert not runs_as_script(text, has_arguments=True), text


@pytest.mark.parametrize("source", RUN.values(), ids=RUN.keys())
def test_a_file_is_run_as_a_script_if_python_would_do_more_than_call_main(workspace: Path, source: str) -> None:
    (workspace / "rule_of_user.py").write_text(source)
    assert runs_as_script("rule_of_user.py")
    assert not runs_as_script("rule_of_user.py:main"), "a named function is called"
    if "main(" in source:
        assert runs_as_script("rule_of_user"), "a module runs as a script, too"
        assert not runs_as_script("rule_of_user.py", has_arguments=True), "an entrypoint with arguments is a function"


def test_a_file_without_a_main_that_does_something_is_a_script(workspace: Path) -> None:
    assert runs_as_script("scripts/script_of_user.py")
    for text in ("scripts/script_of_user.py:train", "plain_of_user.train", "json"):
        assert not runs_as_script(text), text
    (workspace / "only_definitions.py").write_text("'''Words.'''\nimport sys\nN = 3\ndef mian(): ...\n")
    assert not runs_as_script("only_definitions.py"), (
        "a file of definitions alone is not a script, because main may be misspelled"
    )
    with pytest.raises(EntrypointImportError, match=r"has no main. Name the function: only_definitions.py:mian$"):
        check_entrypoint("only_definitions.py", {})
    (workspace / "only_definitions.py").write_text("def plain(): ...\ndef other(): ...\ndef _own(): ...\n")
    told = r"has no main\. Name the function: only_definitions.py:plain or only_definitions.py:other$"
    with pytest.raises(EntrypointImportError, match=told):
        check_entrypoint("only_definitions.py", {})


@pytest.mark.parametrize("text", ["plain_of_user.train", "scripts/train_of_user.py:train", "pkg_of_user.sub.job:main"])
def test_an_entrypoint_finds_its_own_file_alone_in_argv(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (workspace / "pkg_of_user/__init__.py").write_text("")
    (workspace / "pkg_of_user/sub/__init__.py").write_text("")
    (workspace / "pkg_of_user/sub/job.py").write_text("import sys\nARGV = [*sys.argv]\ndef main(): return ARGV\n")
    monkeypatch.setattr(sys, "argv", ["ours", "[9, 10432]"])
    function = load_entrypoint(text)
    (file,) = sys.argv
    assert Path(file).samefile(str(sys.modules[function.__module__].__file__))
    if text.endswith("main"):
        assert function() == [file], "sys.argv is the same while the module is imported"


def test_a_callable_finds_the_file_that_it_is_defined_in(workspace: Path) -> None:
    assert argv_of(functools.partial(functools.cache(test_a_lambda_and_a_decorated_function_pass))) == [__file__]
    assert argv_of(Holder("a secret")) == [__file__]


def test_a_module_runs_as_python_does_with_m(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = workspace / "runs_of_user"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("NAME = 'relative'\n")
    (package / "train.py").write_text("import sys\nfrom .other import NAME\nprint(__name__, NAME, *sys.argv)\n")
    monkeypatch.setattr(sys, "argv", ["before"])
    check_entrypoint("runs_of_user.train:__main__", {"argv": []})
    load_entrypoint("runs_of_user.train:__main__")(argv=["--lr", "1"])
    assert capsys.readouterr().out == f"__main__ relative {package / 'train.py'} --lr 1\n"
    with pytest.raises(EntrypointImportError, match=r"package without a __main__\.py.*as in runs_of_user\.train"):
        check_entrypoint("runs_of_user:__main__", {"argv": []})
    (package / "__main__.py").write_text("import sys\nprint('package', *sys.argv[1:])\n")
    check_entrypoint("runs_of_user:__main__", {"argv": []})
    load_entrypoint("runs_of_user:__main__")(argv=["--lr", "1"])
    assert capsys.readouterr().out == "package --lr 1\n"
    told = r"has no main\. Name the function: .* Or run it as .*: replicas launch -m runs_of_user\.train --n 4"
    (package / "train.py").write_text("def fit(): ...\nfit()\n")
    with pytest.raises(EntrypointImportError, match=told):
        check_entrypoint("runs_of_user.train", {})


def test_a_script_runs_as_python_would_run_it(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["before"])
        assert load_entrypoint("scripts/script_of_user.py:__main__")(argv=["--lr", "1e-3"]) is None
    assert capsys.readouterr().out == "scripts/script_of_user.py --lr 1e-3\n"


def test_a_file_that_was_prepared_is_compiled_and_not_run(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(workspace / "scripts" / "train_of_user.py") + ":train"
    prepare_entrypoint(text)
    assert capsys.readouterr().out == ""
    (workspace / "scripts" / "train_of_user.py").unlink()
    assert load_entrypoint(text)(0.1) == ("train", 0.1, 2)
    assert capsys.readouterr().out == "imported\n"


@pytest.mark.parametrize("source", ["def main(:", None])
def test_a_wrong_settings_file_is_reported_when_it_is_loaded(workspace: Path, source: str | None) -> None:
    path = workspace / "wrong_of_user.py"
    if source is not None:
        path.write_text(source)
    prepare_entrypoint(str(path))
    with pytest.raises((SyntaxError, EntrypointImportError)):
        load_entrypoint(str(path))
