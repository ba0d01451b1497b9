"""Tests the settings of launches: which file wins, which values are refused, and the messages."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

from executors import launch
from executors.cli.config import keys_of
from executors.cli.launch import launch as launch_command
from executors.errors import EntrypointError
from executors.launcher import launch_settings
from executors.launcher.launch_settings import COMMAND_ONLY, FoundSettings, keys_of_launch, read_settings
from executors.registry import executor_class, read_options
from executors.run.run import view_of
from executors.settings.settings import OPTIONS

SCRIPT = '# /// script\n# requires-python = ">=3.11"\n# [tool.replicas]\n# {}\n# ///\ndef main(): ...\n'


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, which is the current one."""
    folder = tmp_path / "work" / "project"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def read(**given: Any) -> FoundSettings:
    return read_settings(keys_of_launch(), **given)


def write(path: str | Path, text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_the_setting_nearest_to_the_launch_wins_and_its_origin_is_named(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("gpu", "seed", "n", "timeout", "run-id", "detach")
    texts = dict(zip(names, ('"H100"', "1", "1", "1", '"a"', "true"), strict=True))

    def some(count: int) -> str:
        return "".join(f"{name} = {texts[name]}\n" for name in names[:count])

    own = write(tmp_path / "config/replicas/replicas.toml", some(6))
    near = write(work.parent / "pyproject.toml", f"[tool.replicas]\n{some(5)}[tool.replicas.profile.small]\nseed = 2\n")
    write(work / "pyproject.toml", '[project]\nname = "of something else"\n')
    script = write("train.py", SCRIPT.format("timeout = 3"))
    given = write("given.toml", 'n = 3\n[profile.small]\ngpu = "A100"\n')
    monkeypatch.setenv("REPLICAS_GPU", "B200:2")
    found = read(config=[given], profile="small", entrypoint="train.py").found
    assert {place[0]: (setting.value, setting.origin) for place, setting in found.items()} == {
        "detach": (True, str(own)),
        "run-id": ("a", str(near)),
        "timeout": (3, f"the '# /// script' block of {script.absolute()}"),
        "n": (3, str(given.absolute())),
        "seed": (2, f"[profile.small] of {near}"),
        "gpu": ("B200:2", "REPLICAS_GPU"),
    }


def test_tables_merge_and_lists_replace() -> None:
    write(
        "replicas.toml",
        'secret = ["a", "b"]\nchaos = ["kill:rank=1"]\nmin_replicas = 1\n[args]\nsteps = 1\nsizes = [1, 2]\n'
        "[option.local]\nmax_parallel = 2\nterm_grace_s = 1.0\n[option.modal]\napp_name = 'x'\n"
        '[profile.p]\nsecret = ["c"]\nargs.sizes = [3]\noption.local.max_parallel = 4\n',
    )
    found = read(profile="p")
    assert found.values == {"secret": ["c"], "chaos": ["kill:rank=1"], "min-replicas": 1}
    assert found.arguments == ({}, {"steps": "1", "sizes": "[3]"})
    assert found.options("local") == {"max_parallel": 4, "term_grace_s": 1.0}
    assert found.origins("local").keys() == {
        "secret", "chaos", "min-replicas", "args.steps", "args.sizes", "option.max_parallel", "option.term_grace_s",
    }  # fmt: skip


def test_variables_of_the_environment_are_texts_of_their_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "N": "3", "TIMEOUT": "1h30m", "DETACH": "yes", "SECRET": "a 'b c'", "MAX_COST": "2.5", "GATHER": "",
        "ARG": "steps=5 name='a b'", "OPTION": "max_parallel=2", "RENDEZVOUS": "s3://bucket/runs",
    }  # fmt: skip
    for name, text in variables.items():
        monkeypatch.setenv(f"REPLICAS_{name}", text)
    write("replicas.toml", 'rendezvous = "here"\n[args]\nsteps = 1\n')
    values = {"n": 3, "timeout": 5400, "detach": True, "secret": ["a", "b c"], "max-cost": 2.5}
    found = read()
    assert found.values == {**values, "rendezvous": "here"}, "the variable is for replicas elsewhere"
    assert found.arguments == ({}, {"steps": "5", "name": "a b"})
    assert found.options("local") == found.options("modal") == {"max_parallel": "2"}
    assert read_options(executor_class("local"), found.options("local")) == {"max_parallel": 2}
    assert read(backend="hf").values == {**values, "rendezvous": "s3://bucket/runs"}
    for name, text, words in (
        ("N", "eight", "REPLICAS_N takes an int, got 'eight'."),
        ("TIMEOUT", "5x", "REPLICAS_TIMEOUT: '5x' is not a duration"),
        ("ARG", "steps", "REPLICAS_ARG: 'steps' is not of the form NAME=VALUE."),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"REPLICAS_{name}", text)
            with pytest.raises(ValueError) as caught:
                read()
            assert str(caught.value).startswith(words)


def test_a_policy_may_be_a_number() -> None:
    write(
        "replicas.toml",
        "restarts = 3\nhang-timeout = 90\nstart-timeout = '20m'\n[profile.firm]\nrestarts = '5/1h,oom=0'\n",
    )
    assert read().values == {"restarts": "3", "hang-timeout": "90", "start-timeout": "20m"}
    assert read(profile="firm").values["restarts"] == "5/1h,oom=0"


def test_an_argument_is_a_text_if_its_annotation_may_explain_it_and_otherwise_the_files_value() -> None:
    write("replicas.toml", '[args]\na = "5"\nb = "word"\nc = 5\nd = 0.5\ne = true\nf = nan\ng = {x = 1}\nh = "true"\n')
    values, texts = read().arguments
    assert values.pop("f") != values
    assert values == {"a": "5", "h": "true"}
    assert texts == {"b": "word", "c": "5", "d": "0.5", "e": "true", "g": '{"x": 1}'}


def test_a_relative_path_in_a_settings_file_counts_from_the_folder_of_the_file(work: Path) -> None:
    write(work.parent / "replicas.toml", 'entrypoint = "lib/train.py:run"\nrendezvous = "runs"\n')
    assert read().values == {"entrypoint": "../lib/train.py:run", "rendezvous": str(work.parent / "runs")}
    for entrypoint, found in {
        "./lib/train.py:run": "../lib/train.py:run",
        "lib//train.py": "../lib/train.py",
        f"{work}/./train.py:run": "train.py:run",
    }.items():
        write(work.parent / "replicas.toml", f'entrypoint = "{entrypoint}"\nhealth-check = "{entrypoint}"\n')
        assert read().values == {"entrypoint": found, "health-check": found}
    write(work.parent / "replicas.toml", 'entrypoint = "pkg.train:run"\nrendezvous = "s3://bucket/runs"\n')
    assert read().values == {"entrypoint": "pkg.train:run", "rendezvous": "s3://bucket/runs"}


REFUSED = {
    'gpus = "H100"': "{file}: No setting 'gpus'. Did you mean 'gpu'? Known: ",
    '[profile.small]\nbakend = "hf"': "[profile.small] of {file}: No setting 'bakend'. Did you mean 'backend'?",
    "[arg]\nsteps = 1": "{file}: No setting 'arg'. Did you mean 'args'?",
    'n = "hunter2"': '{file}: n takes an int, got "hunter2".',
    "n = true": "{file}: n takes an int, got true.",
    "timeout = '5x'": "{file}: timeout = '5x': '5x' is not a duration.",
    "timeout = [1]": "{file}: timeout takes seconds, or a duration as in '1h30m', got [1].",
    "restarts = '3,oon=1'": "{file}: restarts: No reason or setting 'oon'. Did you mean 'oom'?",
    "restarts = true": "{file}: restarts takes a string, got true.",
    "start-timeout = 'soon'": "{file}: start_timeout must be a duration of at least 0.001 s, as in 20m, or auto, "
    "got 'soon'.",
    "hang-timeout = 'soon'": "{file}: hang_timeout must be SOFT, SOFT:HARD, auto or off, as in 2m:3m, got 'soon'.",
    "chaos = 'kill:rank=1'": '{file}: chaos takes a list, each item a string, got "kill:rank=1".',
    "dry-run = 1": "{file}: dry-run takes true or false, got 1.",
    "[env]\nHF_TOKEN = 'hunter2'": "{file}: env is not taken from a file",
    "env = ['HF_TOKEN=hunter2']": "{file}: env is not taken from a file",
    "[secret]\nHF_TOKEN = 'hunter2'": "{file}: secret is a list of names, as in ['wandb'].",
    "secret = ['HF_TOKEN=hunter2']": "{file}: secret is a list of names, as in ['wandb'].",
    "secret = 'hunter2'": "{file}: secret is a list of names, as in ['wandb'].",
    "secret = ['hf_hunter2AbCdEfGhIjKlMnOpQrStUv']": "{file}: secret is a list of names, as in ['wandb'].",
    "args = 3": "{file}: args is a table, as in [args].",
    "[args]\nday = 2026-01-01": "{file}: the argument 'day' holds a date or a time.",
    "[option]\nmax_parallel = 2": "{file}: the option 'max_parallel' belongs in the table of its backend",
    "[option.modla]\na = 2": "{file}, [option]: No backend named 'modla'. Did you mean 'modal'?",
    "run-id = 'a'\nrun_id = 'b'": "{file}: run-id is set twice, as 'run-id' and 'run_id'.",
    "profile = 'small'": "{file}: profile is a table of profiles, as in [profile.small].",
    "[profile.a.profile.b]\nn = 1": "[profile.a] of {file}: a profile holds no other profiles.",
    "n = 1\nbackend =": "{file}, line 2 is not TOML: Invalid value.",
    "n = 1\nn = 2\ngpu = 'x'": "{file}, line 2 is not TOML: Cannot overwrite a value.",
    'n = 1\na = """b': "{file}, line 2 is not TOML: Unterminated string.",
}


@pytest.mark.parametrize("text", REFUSED)
def test_an_unknown_setting_is_refused_by_its_file_and_no_secret_is_shown(work: Path, text: str) -> None:
    write("replicas.toml", text)
    with pytest.raises(ValueError) as caught:
        read()
    assert str(caught.value).startswith(REFUSED[text].format(file=work / "replicas.toml"))
    assert "hunter2" not in str(caught.value) or text.startswith("n =")


def test_files_that_cannot_be_used_are_named(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"No profile 'small'. Known: none. There is no replicas.toml here or above\."):
        read(profile="small")
    file = write("replicas.toml", "[profile.small]\nn = 1\n")
    with pytest.raises(ValueError) as caught:
        read(profile="smal")
    assert str(caught.value) == f"No profile 'smal'. Did you mean 'small'? Known: small. Read: {file.absolute()}."
    write("pyproject.toml", "[tool.replicas]\nn = 2\n")
    with pytest.raises(ValueError, match=f"Two files of {work} hold settings: replicas.toml and pyproject.toml"):
        read()
    file.write_bytes(b"n = 1 # \xff")
    with pytest.raises(ValueError, match=r"replicas\.toml cannot be read: it is not UTF-8\."):
        read()
    file.unlink()
    with pytest.raises(ValueError, match=r"nowhere\.toml' cannot be read: No such file"):
        read(config=["nowhere.toml"])
    write("pyproject.toml", "[project]\n")
    with pytest.raises(ValueError, match=r"pyproject\.toml has no table \[tool\.replicas\]\."):
        read(config=["pyproject.toml"])
    script = write("train.py", "#!/usr/bin/env python\n" + SCRIPT.format("n ="))
    with pytest.raises(EntrypointError, match=r"train\.py, line 5 is not TOML: Invalid value\."):
        read(entrypoint="train.py")
    script.write_text(SCRIPT.format("m = 1") * 2)
    with pytest.raises(EntrypointError, match=r"train\.py has 2 blocks '# /// script'"):
        read(entrypoint="train.py")
    assert capsys.readouterr().err == ""


def test_a_file_above_that_another_user_can_write_is_left_alone(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(work.parent / "replicas.toml", "n = 2\n")
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1000)
    if me == 0:  # a file that root owns is trusted
        os.chown(file, 4711, -1)
    assert read().found == {}
    assert f"{file} belongs to another user and is not read" in capsys.readouterr().err
    assert read(config=[file]).values == {"n": 2}


def test_each_setting_is_a_parameter_of_launch() -> None:
    """A setting that only the command knows would be missing in Python, without an error."""
    parameters = set(inspect.signature(launch).parameters)
    assert OPTIONS.keys() - parameters == set(), "launch() lacks a setting: add a parameter, with an entry in Args"


def test_every_option_of_the_command_is_a_setting_and_python_knows_them_all() -> None:
    class Command:
        callback = staticmethod(launch_command)

    keys = {key: kind for key, (_, kind) in keys_of(Command).items()}
    flags = {name.replace("_", "-") for name in inspect.signature(launch_command).parameters}
    assert flags - keys.keys() == {
        "context",
        "arg",
        "env",
        "option",
        "config",
        "profile",
        "as-json",
        "from-run",
        "secrets",
        "gather-s",
        "rules",
    }
    assert {"from", "secret", "gather", "rule"} <= keys.keys(), "the command's own words for these"
    assert keys == keys_of_launch(), "an option is not a setting: add the setting, or add the option to COMMAND_ONLY"
    assert COMMAND_ONLY.keys() <= keys.keys()


def test_launch_takes_values_that_are_at_their_defaults_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    # Loaded in this process, where another test may have loaded a job.py of its own.
    write("job_of_settings.py", "def main(steps, name): return [steps, name]\n")
    write(
        "replicas.toml",
        'entrypoint = "job_of_settings.py"\nn = 1\nbackend = "inline"\nseed = 3\n[args]\nsteps = 4\nname = "5"\n'
        "[profile.p]\nfail_fast = true\nargs.steps = 5\n",
    )
    run = launch(config=True, profile="p", seed=7)
    assert run.results() == [[5, "5"]]
    assert (view_of(run).backend, view_of(run).record.settings.seed, view_of(run).record.settings.fail_fast) == (
        "inline",
        7,
        True,
    )
    origins = dict(view_of(run).record.origins)
    assert origins.pop("args.steps").startswith("[profile.p] of ")
    assert origins.keys() == {"entrypoint", "n", "fail-fast", "args.name"}
    assert launch("inline", lambda steps, name: [name, steps], 1, args={"steps": 9}, config=True).results() == [
        ["5", 9]
    ]
    with pytest.raises(TypeError, match="needs an executor"):
        launch()
    monkeypatch.setattr(launch_settings, "read_settings", lambda *_, **__: pytest.fail("read without being asked"))
    assert launch("inline", "job_of_settings.py", 1, args={"steps": 1, "name": "x"}).results() == [[1, "x"]]
    assert json.dumps(dict(view_of(run).record.origins))


def test_a_launch_needs_no_folder_of_settings_that_can_be_looked_at(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("replicas.toml", "n = 2\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ("x" * 300)))  # such a path cannot exist in any file system
    assert read().found["n",].value == 2

    def no_home(name: str) -> str:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr("platformdirs.user_config_path", no_home)
    assert read().found["n",].value == 2
