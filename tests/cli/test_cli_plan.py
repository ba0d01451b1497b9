"""`replicas plan`, and the comparison of a run with the plan in `replicas status`."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers.s3.server import S3Server
from support.cli import Folder, HereInstead

from executors import LocalProcessExecutor, Run, launch
from executors.cli import plan_check
from executors.cli.output import UsageProblem
from executors.cli.plan import _rate
from executors.cli.plan_check import MeasuredLink, link_key, save_link
from executors.registry.run_index import state_dir
from executors.run.run import view_of
from executors.store import Entry, MemoryStore
from executors.store.inventory import Inventory
from executors.testing import eventually

EXAMPLE = ("--params", "1.3e9", "--n", "8", "--step", "0.9", "--gpu", "H100", "--steps", "20_000")
BY_HAND = ("--up", "210MB", "--down", "2.08Gbit/s", "--latency", "48ms")
BUCKET = "s3://bucket/runs?region=eu-west-1"
SMALL = ("--params", "100k", "--n", "2", "--step", "40ms")


def test_a_plan_names_the_arguments_to_pass_and_their_costs(here: HereInstead) -> None:
    result = here.replicas("plan", *EXAMPLE, *BY_HAND, "--store", BUCKET)
    assert result.stdout.splitlines() == [
        f"1.3 B parameters, 8 replicas, 0.9 s a step, {BUCKET} (given: 48 ms, 210 MB/s up, 260 MB/s down)",
        'inner_steps=50, fragments=2, overlap_steps=20, merge="carry", wire="int8"',
        "a round of a fragment: 13.9 s (link 8.0, requests 0.8, processor 4.1, noticing 1.0), "
        "hidden behind 18.0 s; 0.1 % of the time lost",
        "per replica and 50 steps: 1.49 GB up, 2.32 GB down; 400 rounds: 12.2 TB in all, $0.64 of requests, "
        "$667 of egress unless the replicas run in eu-west-1",
        'in your loop:  DiLoCo(model, inner_steps=50, fragments=2, overlap_steps=20, merge="carry", wire="int8")',
        "with machines of different speeds:  DiLoCo(model, round_seconds=45, fragments=2, overlap_seconds=18, "
        'merge="carry", wire="int8")',
    ], result
    found = here.replicas(
        "plan", *EXAMPLE, *BY_HAND, "--store", BUCKET, "--price", "put=0,get=0,egress=0.01", "--json"
    ).json
    assert found["settings"]["inner_steps"] == 50
    assert found["round"]["seconds"] == pytest.approx(13.9, abs=0.05)
    assert found["sums"]["requests_usd"] == 0
    assert found["sums"]["egress_usd"] == pytest.approx(74.1, abs=0.1)
    assert found["link"] == {"up": 210e6, "down": 260e6, "latency_s": 0.048, "source": "given"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--inner-steps", "10", "--steps", "200"), 'wire="int8", outer_lr=1.0, outer_momentum=0.5)'),
        (("--inner-steps", "20", "--params", "20M"), "A round misses the last 19 of 20 steps"),
        (("--store", "s3://bucket/runs"), "The link is assumed. Measure it with --probe"),
        (("--store", "s3://b/?endpoint_url=https://s3.example.com"), "the prices of s3.example.com are not known"),
        (("--params", "150M", "--n", "8", "--step", "500ms", "--up", "10MB", "--down", "20MB", "--steps", "2000",
          "--inner-steps", "20"),
         'wire="top8" costs 0.4 to 1 % of loss in a small test. Against wire="int4", rounds take '),
        (("--params", "1.3e9", "--n", "4", "--step", "900ms", "--up", "20MB", "--down", "20MB"),
         'wire="int4" costs no loss that could be measured. Against'),
        (("--up", "20kB", "--down", "20kB", "--params", "1B"), "No settings hide the rounds at this link"),
        (("--up", "2MB", "--down", "2MB", "--params", "10M", "--overlap-steps", "0"), "would be lost with: "),
    ],
)  # fmt: skip
def test_a_plan_names_the_reasons_against_it(here: HereInstead, more: tuple[str, ...], said: str) -> None:
    given = () if "--store" in more else (*BY_HAND,)
    assert said in here.replicas("plan", *SMALL, *given, *more).stdout


def test_a_plan_for_an_endpoint_of_the_environment_is_priced_as_that_endpoint(
    here: HereInstead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(
        "[profile mine]\nregion = auto\nendpoint_url = https://account.r2.cloudflarestorage.com\n"
        "[profile theirs]\nregion = eu-north-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    save_link(MeasuredLink(url="s3://bucket/runs", n=2, at=1.795e9, up=210e6, down=260e6, latency_s=0.048))

    def planned(store: str) -> str:
        return here.replicas("plan", *EXAMPLE, "--store", store).stdout

    assert "(measured" in planned("s3://bucket/runs")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("AWS_DEFAULT_REGION", "eu-west-1")
        assert "(measured" in planned("s3://bucket/runs"), (
            "the measurement of the endpoint is used, although the variables name a region"
        )
    assert "unless the replicas run in eu-north-1" in planned("s3://bucket/runs?profile=theirs")
    at_r2 = planned("s3://bucket/runs?profile=mine")
    assert ("of requests" in at_r2, "of egress" in at_r2) == (True, False)
    assert "(assumed" in planned("s3://bucket/runs?profile=of-another-machine")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.example.com")
    at_example = planned("s3://bucket/runs")
    assert "the prices of s3.example.com are not known" in at_example
    assert "(assumed" in at_example, "the measurement of another service is not used"


def test_a_plan_for_a_bucket_has_objects_that_a_bucket_takes(here: HereInstead) -> None:
    large = ("--params", "8B", "--n", "8", "--step", "20", "--store", BUCKET, "--gpu", "H100")
    assert here.replicas("plan", *large, "--json").json["settings"]["fragments"] > 1
    assert here.replicas("plan", *large[:-4], *BY_HAND, "--fragments", "1").code == 0
    result = here.replicas("plan", *large, "--fragments", "1", "--wire", "int8")
    assert "fragments must be at least 2, because the store accepts no object of more than 5.37 GB" in result.stderr


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ((), "The link is not known. Add --store URL"),
        (("--probe", *BY_HAND), "--probe measures the link to a rendezvous. Add --store URL."),
        (("--params", "many", *BY_HAND), "--params 'many' is not a number of at least 1. Write, for example, 20000"),
        (("--steps", "many", *BY_HAND), "--steps 'many' is not a number of at least 1. Write, for example, 20000"),
        (("--up", "3Mb"), "--up '3Mb' may mean bits or bytes. Give 3Mbit or 3MB."),
        (("--down", "fast"), "--down 'fast' is not a speed. Give bytes or bits a second, as in 20MB"),
        (("--up", "20"), "--up '20' is 20 bytes a second, slower than any link. Add a unit: 20MB or 20Mbit."),
        (("--latency", "soon"), "--latency 'soon' is not a duration."),
        (("--price", "put=5,got=1"), "--price 'got=1' is not a price. Write, for example, put=5,get=0.4,egress=0.09."),
        ((*BY_HAND, "--n", "0"), "--n must be at least 1, got 0."),
        ((*BY_HAND, "--step", "0"), "step_s must be more than 0, got step_s=0.0."),
        ((*BY_HAND, "--wire", "int2"), "wire must be one of fp32, bf16, int8, int4, top8, got wire='int2'."),
        ((*BY_HAND, "--mean-wire", "top8"), "mean_wire must be one of fp32, bf16, int8, int4, each, got"),
        ((*BY_HAND, "--inner-steps", "50", "--fragments", "3"), "got inner_steps=50 and fragments=3."),
        ((*BY_HAND, "--fragments", "0"), "fragments must be at least 1, got fragments=0."),
        ((*BY_HAND, "--inner-steps", "50", "--steps", "20"), "steps must be at least inner_steps"),
        (("--store", "gs://bucket"), "No store has the scheme 'gs'"),
        (("--store", "memory://x", "--probe"), "is in the memory of one process, so its speed cannot be measured"),
        (("--store", "/proc/nothing", "--probe"), "Cannot use the directory file:///proc/nothing"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_made_is_refused_in_a_sentence(
    here: HereInstead, given: tuple[str, ...], problem: str
) -> None:
    result = here.replicas("plan", *SMALL, *given)
    assert (result.code, problem in result.stderr, result.stdout) == (2, True, ""), result


def test_a_run_shorter_than_any_usual_round_is_planned_with_the_rounds_that_are_given(here: HereInstead) -> None:
    slow = ("--up", "2MB", "--down", "2MB", "--steps", "8", "--inner-steps", "4")
    result = here.replicas("plan", *SMALL, *slow)
    assert "2 rounds" in result.stdout, result
    assert "No settings hide the rounds at this link." not in result.stdout


@pytest.mark.parametrize(
    "rate", ["160Mbit", "160mbit", "160MBIT", "160MBit/s", "20MB", "20mB/s", "20e6", "160Mbps", "160 Mb/s"]
)
def test_a_speed_may_be_of_bits_in_any_letters(rate: str) -> None:
    assert _rate(rate) == 20e6


@pytest.mark.parametrize("rate", ["160Mb", "160 mb", "1.6e2Mb", "160Mib"])
def test_a_rate_in_mb_is_answered_with_rates_that_are_taken(rate: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        _rate(rate)
    found = re.findall(r"Give (.+) or (.+)\.$", str(refused.value))
    bits, whole = map(_rate, found[0])
    assert (whole / bits, round(whole)) == (8, 160 << 20 if "i" in rate else 160e6)


def test_a_probe_leaves_a_measurement_here_and_nothing_there(here: HereInstead, tmp_path: Path) -> None:
    there = tmp_path / "not" / "made"
    first = here.replicas("plan", *SMALL, "--store", there, "--probe", "--json").json
    assert first["link"]["source"] == "measured"
    assert not there.parent.exists()
    second = here.replicas("plan", *SMALL, "--store", there, "--json").json
    assert second["link"].pop("source").startswith("measured 0 s ago")
    assert second["link"].items() <= first["link"].items()
    assert first["processor"].keys() == {"encode", "accumulate", "decode", "step", "copy"}
    assert first["processor"]["encode"] != 1.5e9
    twice_as_many = here.replicas("plan", *SMALL, "--n", "4", "--store", there, "--json").json
    assert twice_as_many["processor"]["encode"] <= first["processor"]["encode"]
    assert twice_as_many["link"]["up"] == pytest.approx(first["link"]["up"] / 2)  # the replicas share the disk


def test_a_probe_measures_a_bucket_and_leaves_nothing_there(here: HereInstead, s3: S3Server) -> None:
    s3.misbehave(latency_s=0.01)
    found = here.replicas("plan", *SMALL, "--store", s3.url("runs"), "--probe", "--json").json["link"]
    assert 0.01 <= found["latency_s"] < 1
    written = {row["path"] for row in s3.requests("PUT", "/plan-")}
    assert len(written) == 23
    assert written == {row["path"] for row in s3.requests("DELETE", "/plan-")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_probe_leaves_nothing(folder: Folder, tmp_path: Path, number: int) -> None:
    there = tmp_path / "there"
    there.mkdir()
    with folder.started("plan", *SMALL, "--n", "4", "--store", there, "--probe") as command:
        eventually(lambda: [*there.glob("plan-*/*")], "the probe has written an object")
        command.interrupt(number)
        assert command.ends() in (130, -signal.SIGKILL)
    eventually(lambda: not [*there.iterdir()], "the probe has deleted its objects")


def test_a_bucket_whose_probe_is_interrupted_is_left_as_it_was(folder: Folder, s3: S3Server) -> None:
    s3.misbehave(latency_s=0.02)
    with folder.started("plan", *SMALL, "--store", s3.url("runs"), "--probe") as command:
        eventually(lambda: s3.requests("PUT", "large-"), "the probe is sending a large object")
        command.interrupt()
        assert command.ends() == 130
    written = {row["path"] for row in s3.requests("PUT", "/plan-")}
    assert written == {row["path"] for row in s3.requests("DELETE", "/plan-")} & written


ROUND = {
    "t": 4.0, "entry": 0, "fragment": 0, "ranks": [0], "verdict": "counted", "weight": 10, "up": 5, "down": 7,
    "train_s": 3.0, "wait_s": 0.5, "move_s": 0.25, "reduce_s": 0.125, "step_s": 0.125,
    "busy_s": 26.5, "elements": 650_000_000, "wire": "int8", "mean_wire": "int8",
}  # fmt: skip


def test_status_compares_the_rounds_of_a_run_with_the_plan(here: HereInstead, local: LocalProcessExecutor) -> None:
    with launch(local, "job.py:hang", 1, run_id="mine") as run:
        for changed, said in (
            ({"busy_s": None}, ""),  # written by a version that did not measure this speed
            ({"wire": "int2"}, ""),  # written by a later version with more fields
            ({"elements": 2**53}, ""),
            ({}, "rounds take 2.1x the plan: 26.5 s, planned 12.6 s (48 ms, 210 MB/s up, 260 MB/s down, measured 2026"),
        ):
            view_of(run).store.put("mine/metrics/0000/0/000000.jsonl", json.dumps({**ROUND, **changed}).encode())
            assert "the plan" not in here.replicas("status", "mine").stdout
            save_link(MeasuredLink(url=view_of(run).store.url, n=1, at=1.795e9, up=210e6, down=260e6, latency_s=0.048))
            shown = here.replicas("status", "mine").stdout
            assert (said in shown, "the plan" in shown) == (True, bool(said))
            assert (here.replicas("status", "mine", "--json").json["plan"] is not None) == bool(said)
            (state_dir() / link_key(view_of(run).store.url)).unlink()


def test_status_of_a_long_run_lists_the_measurements_of_four_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each rank, the measurements of its newest attempt count, or of the previous attempt if the newest has had no
    round yet.
    """
    store, listed = MemoryStore(), set[str]()
    for rank in range(8):
        for attempt in range(3):
            store.put(f"mine/replicas/{rank:04d}/{attempt}/started.json", b"{}")
            is_new = (rank, attempt) == (3, 2)
            for number in range(1 if is_new else 30):
                lines = {"t": 1.0, "step": 1} if is_new else {**ROUND, "busy_s": 100.0 * attempt + number + 1}
                store.put(f"mine/metrics/{rank:04d}/{attempt}/{number:06d}.jsonl", json.dumps(lines).encode())
    store.put("mine/replicas/0001/2/outcome.json", b"{}")
    inventory = Inventory.of(store, "mine")
    run = Run(store, "mine")
    view: Any = view_of(run)
    view.record = SimpleNamespace(world_size=8)
    view.reader = SimpleNamespace(records=SimpleNamespace(inventory=inventory))
    link = MeasuredLink(url="memory://", n=8, at=1.795e9, up=210e6, down=260e6, latency_s=0.048)
    monkeypatch.setattr(plan_check, "find_link", lambda url, n: link)
    monkeypatch.setattr(plan_check, "LAST_ROUNDS", 1)
    everything = store.list

    def listing(prefix: str) -> Iterator[Entry]:
        for entry in everything(prefix):
            listed.add(entry.key.rpartition("/")[0].removeprefix("mine/metrics/"))
            yield entry

    monkeypatch.setattr(store, "list", listing)
    compared = plan_check.compare_with_plan(run)
    assert compared is not None
    assert compared.round_s == 230.0, "status shows the median of the newest segments"
    assert sorted(listed) == ["0000/2", "0002/2", "0003/1", "0003/2", "0004/2"], (
        "status reads the segments of at most four ranks"
    )
