"""The health checks that ship: each reports what it found by value."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from executors.errors import ReplicasError
from executors.replica import Replica
from executors.settings import Settings
from executors.settings.health_checks import LIMITS_S, limit_of, shipped_checks
from executors.store import MemoryStore
from executors.store.protocol import Entry
from executors.worker import shipped_checks as checks
from executors.worker.shipped_checks import FoundProblem, check_devices, judge_smi, run_check

HEALTHY = "0, NVIDIA H100 80GB HBM3, 35, 0, Not Active, Not Active\n"


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    return Replica(0, 1, "otter", 0, tmp_path.as_uri())


@pytest.fixture
def in_store(monkeypatch: pytest.MonkeyPatch, replica: Replica) -> Any:
    """Return a function that gives the replica another store."""

    def use(store: Any) -> Replica:
        monkeypatch.setattr(Replica, "store", property(lambda self: store))
        return replica

    return use


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu", ("gpu",)),
        ("store,gpu", ("gpu", "store")),
        ("all", tuple(LIMITS_S)),
        ("checks.py:gpu", ()),
        ("pkg.mod.f", ()),
        ("folder/checks.py", ()),
    ],
)
def test_a_text_names_checks_or_a_function(text: str, names: tuple[str, ...]) -> None:
    assert shipped_checks(text) == names
    assert Settings.of(n=1, health_check=text).health_check == text


@pytest.mark.parametrize(("text", "near"), [("gpus", "gpu"), ("dsk,gpu", "disk"), ("cloc", "clock"), ("", "")])
def test_a_name_that_is_no_check_is_refused_with_the_nearest_one(text: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"health_check: No health check .*{near}"):
        Settings.of(n=1, health_check=text)


def test_each_check_has_a_limit_and_several_have_the_sum() -> None:
    assert LIMITS_S.keys() == LIMITS_S.keys()
    assert limit_of("gpu,disk", 7.0) == LIMITS_S["gpu"] + LIMITS_S["disk"]
    assert limit_of("checks.py:gpu", 7.0) == 7.0


def test_the_store_check_measures_each_step_and_leaves_nothing(replica: Replica) -> None:
    assert "4 MiB were written in 0." in run_check("store", replica, None)
    assert [*replica.store.list("")] == []


class ChangesBytes(MemoryStore):
    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        return memoryview(bytes(len(super().get(key, start=start, size=size))))


def test_a_store_that_changes_bytes_fails(in_store: Any) -> None:
    store = ChangesBytes()
    with pytest.raises(FoundProblem, match="returned other bytes than were written"):
        run_check("store", in_store(store), None)
    assert [*store.list("")] == []


class OtherClock(MemoryStore):
    """A store whose clock differs."""

    def __init__(self, by_s: float) -> None:
        super().__init__()
        self._by_s = by_s

    def list(self, prefix: str) -> Any:
        return (Entry(each.key, each.size_bytes, each.modified_at + self._by_s) for each in super().list(prefix))


@pytest.mark.parametrize(("by_s", "words"), [(300.0, r"(299|300) s behind"), (-300.0, r"(299|298) s ahead of")])
def test_a_clock_that_differs_by_more_than_a_minute_fails_with_the_difference(
    in_store: Any, by_s: float, words: str
) -> None:
    with pytest.raises(FoundProblem, match=words):
        run_check("clock", in_store(OtherClock(by_s)), None)
    assert "differs from the clock of the store by" in run_check("clock", in_store(OtherClock(0.0)), None)


def test_the_process_of_a_command_leaves_the_gpus_to_a_child(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_gpu = "import os\nfrom types import SimpleNamespace\n__version__ = str(os.getpid())\nprint('loading')\n"
    no_gpu += "cuda = SimpleNamespace(is_available=lambda: False)\nversion = SimpleNamespace(cuda='13.0')\n"
    (tmp_path / "torch.py").write_text(no_gpu)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FoundProblem, match=r"^no GPU can be used: PyTorch \d+ finds none") as found:
        run_check("gpu", replica, None, in_child=True)
    assert f"PyTorch {os.getpid()} " not in str(found.value)
    assert run_check("gpu", replica, None, is_one_of_all=True, in_child=True).startswith("skipped")
    (tmp_path / "torch.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(FoundProblem, match="the process that asks the GPUs ended with 7"):
        run_check("gpu", replica, None, in_child=True)


def test_a_full_disk_fails_with_the_free_space(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GB are free in the store" in run_check("disk", replica, None)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(100 * 10**9, 0, 10**8))
    with pytest.raises(FoundProblem, match=r"0\.1 of 100\.0 GB are free .*, less than 1\.1 GB"):
        run_check("disk", replica, None)


def test_a_product_is_compared_with_the_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert "GPU 0: a product of 1024 x 1024 is right in" in check_devices([0], "cpu")
    move = torch.Tensor.cpu

    def broken(tensor: torch.Tensor) -> torch.Tensor:
        tensor = move(tensor).clone()
        tensor[3, 5] += 1
        return tensor

    monkeypatch.setattr(torch.Tensor, "cpu", broken)
    with pytest.raises(FoundProblem, match="GPU 0 computed 1 of 1048576 values of a matrix product wrongly"):
        check_devices([0], "cpu")


def test_a_machine_without_a_gpu_fails_the_check_and_is_skipped_by_all(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_why_no_gpu", lambda: "PyTorch 9.9 finds none (CUDA is not built in)")
    with pytest.raises(ReplicasError, match=r"no GPU can be used: PyTorch 9\.9 finds none"):
        run_check("gpu", replica, None)
    assert "skipped" in run_check("gpu", replica, None, is_one_of_all=True)
    with pytest.raises(ReplicasError, match="no GPU can be used"):
        run_check("gpu", replica, "H100", is_one_of_all=True)


def test_without_pytorch_the_reason_is_pytorch(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FoundProblem, match="no GPU can be used: PyTorch is not installed"):
        run_check("gpu", replica, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEALTHY, "NVIDIA H100 80GB HBM3 at 35 °C, 0 ECC errors, not throttled"),
        (HEALTHY.replace(" 0, Not", " [N/A], Not"), "ECC is not reported"),
        ("", "nvidia-smi lists no GPU"),
        ("a line of a driver\n", "nvidia-smi lists no GPU"),
    ],
)
def test_nvidia_smi_is_reported_by_value(text: str, words: str) -> None:
    assert words in judge_smi(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEALTHY.replace(" 0, Not", " 17, Not"), "has 17 memory errors that ECC cannot correct"),
        (HEALTHY.replace("35, 0, Not Active", "91, 0, Active"), "throttled because of heat, at 91 °C"),
        (HEALTHY.replace("Not Active\n", "Active\n"), "throttled because of its power supply"),
    ],
)
def test_errors_and_throttling_of_a_gpu_fail_the_check(text: str, words: str) -> None:
    with pytest.raises(FoundProblem, match=words):
        judge_smi(text)
