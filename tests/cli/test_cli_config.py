"""`replicas launch` with settings from files, and `replicas config`."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from support.cli import HereInstead

from executors import list_runs
from executors.registry import BUILT_IN
from executors.run.run import view_of

SETTINGS = """\
entrypoint = "job:echo"
n = 8
timeout = "2m"
[args]
steps = 40
name = "5"
[option.local]
preload = []
term_grace_s = 0.5
[profile.laptop]
n = 1
args.where = "here"
"""


@pytest.fixture
def file(here: HereInstead) -> Path:
    path = here.folder.path / "replicas.toml"
    path.write_text(SETTINGS)
    return path


def test_a_profile_alone_launches_a_run_and_its_record_has_the_origin_of_each_setting(
    here: HereInstead, file: Path
) -> None:
    result = here.replicas("launch", "--profile", "laptop", "--arg", "steps=7", "--json")
    assert result.code == 0, result
    assert result.json["replicas"][0]["result"] == {"steps": 7, "name": "5", "where": "here"}
    assert (result.json["world_size"], result.json["timeout_s"]) == (1, 120.0)
    (run,) = list_runs()
    assert view_of(run).record.origins == {
        "entrypoint": str(file),
        "timeout": str(file),
        "n": f"[profile.laptop] of {file}",
        "args.steps": "--arg",
        "args.name": str(file),
        "args.where": f"[profile.laptop] of {file}",
        "option.preload": str(file),
        "option.term_grace_s": str(file),
        "profile": "--profile",
        "json": "--json",
    }


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    here: HereInstead, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAS_PROFILE", "laptop")
    monkeypatch.setenv("REPLICAS_N", "3")
    monkeypatch.setenv("REPLICAS_TIMEOUT", "1h")
    planned = here.replicas("launch", "--n", 2, "--dry-run", "--option", "max_parallel=1").json
    record = planned["run_record"]
    (place,), settings = record["placements"], record["settings"]
    assert (settings["n"], settings["timeout"], place["executor_options"]["max_parallel"]) == (2, 3600.0, 1)
    origins = record["origins"]
    assert (origins["n"], origins["timeout"], origins["option.max_parallel"]) == ("--n", "REPLICAS_TIMEOUT", "--option")
    assert list_runs() == []


def test_an_error_is_a_document_where_json_is_set_by_file_or_variable(
    here: HereInstead, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.folder.path / "j.toml").write_text("json = true")
    (here.folder.path / "bad.toml").write_text("json = true\nn = 'many'")
    nowhere = ("launch", "nosuch.py")
    done = here.replicas(*nowhere, "--config", "j.toml")
    assert (done.code, "nosuch.py" in done.json["error"]) == (2, True)
    assert here.replicas(*nowhere).stdout == ""
    monkeypatch.setenv("REPLICAS_JSON", "true")
    for more, kind in (
        ([], "EntrypointImportError"),
        (["--config", "bad.toml"], "UsageProblem"),  # a file that cannot be read gives no settings
        (["--nosuch"], "NoSuchOption"),
    ):
        assert here.replicas(*nowhere, *more).json["kind"] == kind
    monkeypatch.setenv("REPLICAS_JSON", "perhaps")
    done = here.replicas(*nowhere)
    assert (done.stdout, "REPLICAS_JSON takes true or false, got 'perhaps'" in done.stderr) == ("", True)


def test_an_error_about_a_setting_of_a_launch_names_the_file_of_the_setting(here: HereInstead, file: Path) -> None:
    known = ", ".join(sorted(BUILT_IN))
    for change, message in (
        ("n = 0", f"Error: n must be at least 1, got n=0.\n  The setting n is from {file}.\n"),
        (
            "backend = 'modla'",
            f"Did you mean 'modal'? Known: {known}.\n  The setting backend is from {file}.\n",
        ),
        ("entrypoint = 'jb.py'", f"does not exist. Did you mean 'job.py'?\n  The setting entrypoint is from {file}.\n"),
        ("option.local.gpu = 1", f"max_parallel, preload, term_grace_s.\n  The setting option.gpu is from {file}.\n"),
        ("option.local.preload = 1", f"got 1.\n  The setting option.preload is from {file}.\n"),
        (
            "args.steps = 'x'\nentrypoint = 't.py'",
            f"takes steps as an int.\n  The setting args.steps is from {file}.\n",
        ),
        ("[profile.small]\nm = 1", f"Error: [profile.small] of {file}: No setting 'm'. Known: args, backend"),
    ):
        (here.folder.path / "t.py").write_text("def main(steps: int): ...\n")
        file.write_text(change if "[" in change else f"{change}\n" + ("" if change.startswith("n ") else "n = 1\n"))
        result = here.replicas("launch")
        assert (result.code, result.stdout) == (2, ""), change
        assert message in result.stderr, change
    file.write_text(SETTINGS)
    result = here.replicas("launch", "", "--n", 1)
    assert (result.code, "Bad entrypoint ''" in result.stderr) == (2, True), (
        "an empty argument is not replaced by the entrypoint of the file"
    )
    assert "is from" not in result.stderr, "the message names no file, because the value is from the command line"
    file.write_text("n = ")
    assert here.replicas("launch", "--help").code == 0, "--help works with a broken settings file"


def test_config_prints_the_settings_in_force_and_their_origins(
    here: HereInstead, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAS_GPU", "H100")
    result = here.replicas("config", "--profile", "laptop")
    assert result.code == 0
    tables = tomllib.loads(result.stdout)
    assert tables["args"] == {"steps": 40, "name": "5", "where": "here"}
    assert (tables["n"], tables["gpu"], tables["option"]["local"]["preload"]) == (1, "H100", [])
    lines = [re.split("  +# ", line) for line in result.stdout.splitlines()]
    assert ["n = 1", f"[profile.laptop] of {file}"] in lines
    assert ['gpu = "H100"', "REPLICAS_GPU"] in lines
    document = here.replicas("config", "--json").json
    assert document["files"] == [str(file)]
    assert document["settings"]["option.local.preload"] == {"value": [], "origin": str(file)}
    file.write_text("[option.local]\nmax_paralel = 2\n")
    result = here.replicas("config")
    assert result.code == 2
    assert f"{file}: Backend 'local' has no option 'max_paralel'. Did you mean 'max_parallel'?" in result.stderr
    file.unlink()
    monkeypatch.delenv("REPLICAS_GPU")
    assert "No settings" in here.replicas("config").stdout


def test_the_template_names_every_setting_and_holds_once_it_is_uncommented(here: HereInstead) -> None:
    file = here.folder.path / "replicas.toml"
    assert here.replicas("config", "--template").code == 0
    assert tomllib.loads(file.read_text()) == {}
    file.write_text(re.sub(r"(?m)^# ([\w-]+ = .*|\[.*\])$", r"\1", file.read_text()))
    result = here.replicas("config", "--json")
    assert result.code == 0, result
    assert {"entrypoint", "n", "secret", "json", "args.steps", "option.local.preload"} <= result.json["settings"].keys()
    assert here.replicas("config", "--template").code == 2, "--template does not overwrite an existing file"
    assert os.path.getsize(file) > 1000
