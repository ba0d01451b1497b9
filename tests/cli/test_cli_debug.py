"""`replicas debug`: an archive with everything about a run, and with no secret in it."""

from __future__ import annotations

import base64
import json
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import pytest
from support.cli import HereInstead

from executors import LocalProcessExecutor, launch
from executors.cli.debug_archive import MAX_SECRET, ArchiveWriter, LogEnd, Part
from executors.cli.debug_parts import LOG_BYTES, RunParts, masker_of
from executors.errors import StoreError
from executors.masking import MASK, Masker
from executors.run.run import view_of
from executors.store.memory import MemoryStore
from executors.store.protocol import Entry
from executors.testing import eventually
from executors.view.run_view import RunView

LEAKY = """
import logging, os, warnings
from executors import current_replica

IN_CODE = "sEcret1InCode"

def main(api_key, url, text="x"):
    rank = current_replica().rank
    print("env", os.environ["DB_HOST_NAME"], os.environ["MODE_OF_DAY"])
    print("password: correct sEcret2InLog")
    print("Authorization: Bearer sEcret3InLog")
    print("hook https://hooks.slack.com/services/T0/B0/sEcret4InLog")
    print("encoded https%3A%2F%2Fme%3AsEcret5InLog%40host")
    print("basic dXNlcjpzRWNyZXQ2SW5Mb2c=")
    print("-----BEGIN PRIVATE KEY-----\\nc0VjcmV0N0luUGVt\\n-----END PRIVATE KEY-----")
    print("home /home/sEcret8User/x and modal ak-sEcret9InLog1a2B3c4D")
    warnings.warn("token=sEcret10InWarning")
    with open("sEcret.txt", "w") as file:
        file.write("x")
    current_replica().save_artifact("ghp_sEcret11InName0123456789/x.txt", "sEcret.txt")
    # The log is cut in the middle of this line.
    print("a" * 100 + " DB_PASSWORD=" + "sEcret12AtTheCut" * 4096, flush=True)
    for _ in range(1060):
        print("b" * 1020)
    try:
        raise KeyError("password=sEcret13InCause")
    except KeyError as error:
        raise RuntimeError(f"cannot log in at {url} with {api_key}") from error
"""
ARGUMENTS = {
    "api_key": "sEcret14InArgument",
    "url": "postgres://me:sEcret15InUrl@db/x",
    "text": "hf_sEcret16InText0123",
}
ENVIRONMENT = {"DB_HOST_NAME": "sEcret17 of the environment", "MODE_OF_DAY": "sEcret18-quiet"}
MARK = "sEcret"


@pytest.fixture
def leaky(here: HereInstead, local: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch) -> str:
    (here.folder.path / "leaky.py").write_text(LEAKY)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    run = launch(local, "leaky:main", 1, args=ARGUMENTS, env=ENVIRONMENT, run_id="leaky")
    assert run.wait(60)
    return run.run_id


def members_of(path: Path) -> dict[str, str]:
    """Return the files of an archive, without the name of its folder."""
    with tarfile.open(path, "r:gz") as tar:
        found = {each.name: cast(Any, tar.extractfile(each)).read().decode() for each in tar.getmembers()}
    return {name.partition("/")[2]: text for name, text in found.items()}


def forms_of(text: str) -> Iterator[str]:
    """Yield a text, its percent-decoded form, and what its long words are in base64."""
    yield text
    yield unquote(unquote(text))
    for word in {*text.replace('"', " ").replace("'", " ").split()}:
        try:
            yield base64.b64decode(word, validate=True).decode("latin-1")
        except ValueError:
            continue


def test_no_planted_secret_is_in_the_archive(here: HereInstead, leaky: str) -> None:
    told = here.replicas("debug", leaky, "--out", "a.tar.gz", "--issue")
    assert told.code == 0
    path = here.folder.path / "a.tar.gz"
    files = members_of(path)
    found = {
        name: text[max(0, text.find(MARK) - 60) :][:120]
        for name, content in [*files.items(), ("stdout", told.stdout), ("stderr", told.stderr)]
        for text in (name, *forms_of(content))
        if MARK in text
    }
    # The name of the file that the user's code wrote is in a traceback neither, so no form of the mark is there.
    assert found == {}
    assert {
        "records/run.json", "settings.json", "events.jsonl", "status.json", "logs/0000/0.log", "metrics.jsonl",
        "report.html", "keys.txt", "versions.json", "doctor.json", "environment.json", "manifest.json",
    } <= files.keys()  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(files["records/run.json"])["task_digest"] in files["records/run.json"]
    log = files["logs/0000/0.log"]
    assert len(log) <= LOG_BYTES
    assert log.startswith("b")
    assert "RuntimeError: cannot log in at postgres://***@db/x" in files["report.html"].replace("&#39;", "'")
    assert told.stdout.startswith("### Run `leaky`")
    assert "RuntimeError" in told.stdout


def test_the_code_of_the_user_is_in_the_archive_only_with_code(here: HereInstead, leaky: str) -> None:
    assert here.replicas("debug", leaky, "--out", "a.tar.gz").code == 0
    assert not any("IN_CODE" in text for text in members_of(here.folder.path / "a.tar.gz").values())
    made = here.replicas("debug", leaky, "--out", "b.tar.gz", "--code", "--json").json
    code = members_of(here.folder.path / "b.tar.gz")["code/entrypoint/leaky.py"]
    assert "IN_CODE" in code
    assert "def main(api_key, url" in code
    assert not any("--code" in line for line in made["left_out"])


def test_the_content_is_listed_first_and_written_only_with_out(here: HereInstead, leaky: str) -> None:
    told = here.replicas("debug", leaky)
    assert "The archive of leaky contains:" in told.stdout
    assert "replicas debug leaky --out leaky.tar.gz" in told.stdout
    made = here.replicas("debug", leaky, "--json").json
    assert (made["out"], made["size_bytes"], made["issue"]) == (None, None, None)
    assert {"logs/0000/0.log", "report.html"} <= {each["name"] for each in made["files"]}
    assert not [*here.folder.path.glob("*.tar.gz")]


def test_a_file_that_exists_is_replaced_only_with_force(here: HereInstead, leaky: str) -> None:
    path = here.folder.path / "a.tar.gz"
    path.write_text("mine")
    told = here.replicas("debug", leaky, "--out", "a.tar.gz")
    assert (told.code, "exists. Add --force" in told.stderr, path.read_text()) == (2, True, "mine")
    assert here.replicas("debug", leaky, "--out", "a.tar.gz", "--force").code == 0
    assert "records/run.json" in members_of(path)
    told = here.replicas("debug", leaky, "--out", "missing/a.tar.gz")
    assert (told.code, "Cannot write to" in told.stderr) == (2, True)
    assert here.replicas("debug", "never-was", "--out", "b.tar.gz").code == 2


@pytest.mark.parametrize("damage", [b"{not json password=sEcret19", b'{"run_id": 1}', None, b"\xff\0" * 10])
def test_a_run_with_a_damaged_record_has_an_archive(here: HereInstead, leaky: str, damage: bytes | None) -> None:
    record = next(here.folder.path.parent.rglob("leaky/run.json"))
    record.unlink() if damage is None else record.write_bytes(damage)
    made = here.replicas("debug", leaky, "--out", "a.tar.gz", "--json", "--issue").json
    files = members_of(here.folder.path / "a.tar.gz")
    assert any("run.json" in problem for problem in made["problems"])
    assert "logs/0000/0.log" in files, (made["problems"], sorted(files))
    assert "versions.json" in files
    assert "cannot be read" in made["issue"]
    assert MARK not in files.get("records/run.json", "")
    assert json.loads(files["manifest.json"])["problems"] == made["problems"]


class OddStore:
    """A store with keys that no file system has, and with objects that cannot be read."""

    url = "memory://odd"

    def __init__(self, keys: dict[str, bytes], *, silent: bool = False) -> None:
        self._keys = keys
        self._silent = silent
        self.n_reads = 0

    def list(self, prefix: str) -> Iterator[Entry]:
        if self._silent:
            raise StoreError(f"{self.url} did not answer within 5 s.", url=self.url)
        return (Entry(key, len(data), 0.0) for key, data in sorted(self._keys.items()))

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        self.n_reads += 1
        if self._silent or key.endswith("lost.json"):
            raise StoreError(f"{self.url} did not answer within 5 s.", url=self.url)
        data = self._keys[key]
        return memoryview(data)[start : None if size is None else start + size]


def written(store: OddStore, path: Path) -> tuple[dict[str, str], list[str]]:
    problems: list[str] = []
    reader = RunParts(RunView(cast(MemoryStore, store), "odd"), False, problems)
    reader.find_objects()
    writer = ArchiveWriter("replicas-debug-odd", Masker(), store.url)
    writer.problems = problems
    made = writer.write(path, reader.parts(), {}, lambda words: None)
    return members_of(path), made.problems


def test_keys_of_a_hostile_bucket_lead_nowhere(tmp_path: Path) -> None:
    keys = {
        "odd/../../etc/passwd.json": b"{}", "odd//abs.json": b"{}", "odd/a/./b.json": b"[]",
        "odd/x\n\x1b[2J.json": b"1", "odd/replicas/0000/0/lost.json": b"{}", "odd/deep.json": b"[" * 100_000,
        "odd/big.json": b'"' + b"a" * (3 << 20), "odd/" + "long/" * 90 + "x.json": b"{}",
        "odd/number.json": b"9" * 10_000, "odd/A b.json": b"1", "odd/A_b.json": b"2",
    }  # fmt: skip
    store = OddStore(keys)
    files, problems = written(store, tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        for member in tar.getmembers():
            assert member.isfile()
            assert member.name.startswith("replicas-debug-odd/")
            assert not {"", ".", ".."} & {*member.name.split("/")}
            assert member.name.isprintable()
    assert sum(name.startswith("records/") for name in files) == len(keys) - 1
    assert all(len(text) <= (1 << 20) + 10 for name, text in files.items() if name.startswith("records/"))
    named = "\n".join(problems)
    assert all(word in named for word in ("lost.json", "deep.json", "big.json", "number.json"))


def test_a_store_that_does_not_answer_is_asked_a_few_times_only(tmp_path: Path) -> None:
    keys = {f"odd/decisions/{number:06}.json": b"{}" for number in range(50)}
    store = OddStore(keys)
    store_with_list = OddStore(keys, silent=True)
    store_with_list.list = store.list  # type: ignore[method-assign]
    files, problems = written(store_with_list, tmp_path / "a.tar.gz")
    assert store_with_list.n_reads < 10
    assert sum("not read, because the store did not answer" in each for each in problems) > 40
    assert {*files} == {"keys.txt", "manifest.json"}


def test_the_archive_of_the_same_parts_has_the_same_bytes(tmp_path: Path) -> None:
    keys = {"odd/b.json": b'{"a": 1}', "odd/a.json": b"{}"}
    written(OddStore(keys), tmp_path / "a.tar.gz")
    written(OddStore(dict(reversed(keys.items()))), tmp_path / "other.tar.gz")
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "other.tar.gz").read_bytes()


def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    def interrupt() -> list[tuple[str, Any]]:
        raise KeyboardInterrupt

    writer = ArchiveWriter("x", Masker(), "memory://odd")
    with pytest.raises(KeyboardInterrupt):
        writer.write(
            tmp_path / "a.tar.gz", [Part("a", lambda: [("a", "b")]), Part("b", interrupt)], {}, lambda words: None
        )
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("at", [-3, -1, 0, 1, 5, 15, 29])
def test_a_secret_at_the_cut_of_a_log_is_masked(at: int, tmp_path: Path) -> None:
    secret = "DB_PASSWORD=sEcret20;part,two"
    after = "c" * 99 + "\n"
    text = f"{'d' * 2000}\n{secret}\n{after * ((LOG_BYTES + MAX_SECRET) // 100)}"
    start = text.index(secret) + at
    writer = ArchiveWriter("x", Masker(), "memory://odd")
    end = LogEnd(text[max(0, start) :], LOG_BYTES, is_cut=True)
    writer.write(tmp_path / "a.tar.gz", [Part("log", lambda: [("log", end)])], {}, lambda words: None)
    log = members_of(tmp_path / "a.tar.gz")["log"]
    assert MARK not in log
    assert "two" not in log
    assert log.startswith("c")


def test_the_masker_of_a_run_knows_the_values_of_its_variables(here: HereInstead, leaky: str) -> None:
    from executors import attach

    view = view_of(attach(leaky))
    masker = masker_of(view, view.record)
    assert masker.text("it is sEcret17 of the environment") == f"it is {MASK}"
    assert eventually(lambda: view.record.placements[0].env, "names") == tuple(sorted(ENVIRONMENT))


def test_a_value_of_the_launch_that_this_shell_does_not_have_is_masked_if_it_is_given_again(
    here: HereInstead, leaky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)
    told = [f"--env={name}={value}" for name, value in ENVIRONMENT.items()]
    assert here.replicas("debug", leaky, "--out", "a.tar.gz", *told).code == 0
    assert not [name for name, text in members_of(here.folder.path / "a.tar.gz").items() if MARK in text]
    refused = here.replicas("debug", leaky, "--env", "sEcret19")
    assert refused.code == 2
    assert "--env" in refused.stderr
