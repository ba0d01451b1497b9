"""Several processes of one replica train one model together, replicated by DDP or sharded by `fully_shard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.members import each_kind, inner_step, run_members, shards_on_cpus, small_model, whole, wrapped

from diloco import DiLoCo
from diloco.errors import ContributionError
from diloco.member_group import weighted_sum
from diloco.process_check import find_group
from executors.replica import current_replica
from executors.store import store_at

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fragments": {"fragments": 3},
    "int8": {"wire": "int8"},
    "bf16/int8": {"wire": "bf16", "mean_wire": "int8"},
    "overlap": {"overlap_steps": 1, "background": False},
    "carry+int8": {"merge": "carry", "wire": "int8", "overlap_steps": 1, "background": False},
    "mix": {"mix": 0.5},
    "background": {"overlap_steps": 1, "background": True},
}


def trained(kind: str, rank: int, cases: list[str], total_steps: int = 12) -> dict[str, Any]:
    """Train the small model in each case. Return anchor and live values."""
    found = {}
    for number, case in enumerate(cases):
        plain = small_model()
        model = wrapped(plain, kind)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        diloco = DiLoCo(model, inner_steps=3, total_steps=total_steps, name=f"case{number}", **CASES[case])
        data = torch.Generator().manual_seed(5 + rank)
        for _ in diloco.steps():
            inner_step(model, optimizer, data)
            diloco.step()
        anchor = diloco.anchor()
        diloco.close()
        found[case] = anchor, {name: whole(p) for name, p in plain.named_parameters()}
    return found


def check_equal(found: dict[tuple[int, int], Any], reference: dict[str, Any]) -> None:
    for (rank, member), cases in found.items():
        assert not isinstance(cases, str), f"member {member} of rank {rank}: {cases}"
        for case, (anchor, live) in cases.items():
            expected_anchor, expected = reference[case]
            where = f"{case}, member {member} of rank {rank}"
            assert all(torch.equal(live[name], values) for name, values in expected.items()), where
            assert anchor.keys() == (expected_anchor.keys() if member == 0 else set()), where
            assert all(torch.equal(anchor[name], expected_anchor[name]) for name in anchor), where


@each_kind
def test_a_replica_of_two_processes_ends_with_the_bits_of_one_process(kind: str, tmp_path: Path) -> None:
    def body(rank: int, member: int) -> Any:
        return trained(kind if current_replica().members > 1 else "one", rank, ["plain"], 3)

    (folder := tmp_path / "one").mkdir()
    reference = run_members(folder, [1], body)[0, 0]
    (folder := tmp_path / "two").mkdir()
    check_equal(run_members(folder, [2], body), reference)


@each_kind
def test_replicas_of_two_processes_end_with_the_bits_of_replicas_of_one_process_for_each_merge(
    kind: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "one").mkdir()
    reference = run_members(folder, [1, 1], lambda rank, member: trained("one", rank, list(CASES)))
    (folder := tmp_path / "two").mkdir()
    check_equal(run_members(folder, [2, 2], lambda rank, member: trained(kind, rank, list(CASES))), reference[0, 0])


@shards_on_cpus
def test_a_replica_of_one_process_and_a_sharded_one_train_in_one_run(tmp_path: Path) -> None:
    sizes = [1, 2]
    found = run_members(
        tmp_path, sizes, lambda rank, member: trained("one" if sizes[rank] == 1 else "sharded", rank, ["fragments"])
    )
    check_equal(found, found[0, 0])


def test_members_with_other_parameters_are_refused_with_the_remedy(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> None:
        model = small_model()
        diloco = DiLoCo(model, inner_steps=1)
        with torch.no_grad():
            next(model.parameters()).add_(member)
        diloco.step()

    for text in run_members(tmp_path, [2], body).values():
        assert text == (
            "ContributionError: Member 1 of this replica has other parameters than member 0, so only the work of one "
            "would count. Wrap the model in DistributedDataParallel, or shard it by fully_shard."
        )


def test_after_an_error_about_other_parameters_the_members_still_make_their_calls_together(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> int:
        model = small_model()
        diloco = DiLoCo(model, inner_steps=1)
        with torch.no_grad():
            next(model.parameters()).add_(member)
        with pytest.raises(ContributionError, match="Member 1"):
            diloco.step()
        return len(diloco.state_dict())

    found = run_members(tmp_path, [2], body)
    assert (found[0, 0] > 0, found[0, 1]) == (True, 0), found


def test_the_sum_that_compares_tensors_on_a_device_sees_each_bit_and_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diloco.member_group.PIECE", 16)
    values = torch.arange(50, dtype=torch.uint8)
    sums = {weighted_sum(values)}
    for place in range(50):
        changed = values.clone()
        changed[place] ^= 1
        sums.add(weighted_sum(changed))
    swapped = values[[*range(16, 32), *range(16), *range(32, 50)]]
    assert len(sums | {weighted_sum(swapped)}) == 52
    assert weighted_sum(values[:0]) == 0


def test_an_error_of_the_leader_is_raised_in_all_members(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> tuple[str, bool]:
        with pytest.raises(ValueError, match="total_steps must be at least inner_steps") as raised:
            DiLoCo(small_model(), inner_steps=10, total_steps=5)
        return str(raised.value), getattr(raised.value, "of_another_member", False)

    found = run_members(tmp_path, [2], body)
    assert found[0, 1] == (found[0, 0][0], True)
    assert found[0, 0][1] is False, "the outcome of the replica names the leader, which has the place of the error"


def test_members_that_do_not_open_the_diloco_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.process_check.WAIT_FOR_MEMBERS_S", 0.3)

    def body(rank: int, member: int) -> None:
        if member == 0:
            try:
                DiLoCo(small_model())
            finally:
                dist.barrier()  # the other member stays until the error was raised
        else:
            dist.barrier()

    found = run_members(tmp_path, [2], body)
    assert found[0, 0] == ("DiLoCoError: Member 1 has not opened the DiLoCo 'main': open it in all, or say group=None.")


def test_one_member_may_train_alone_and_another_one_is_refused(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> int:
        with DiLoCo(small_model(), inner_steps=1, group=None, allow_no_rounds=True) as diloco:
            return diloco.rounds

    found = run_members(tmp_path, [2], body)
    assert found[0, 0] == 0
    assert "group=None lets member 0 alone open the DiLoCo 'main', and this is member 1 of 2." in found[0, 1]


def test_a_group_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match='group must be "auto", None or a process group of torch, got group='):
        DiLoCo(small_model(), group=3)
    with pytest.raises(TypeError, match="got group='all'"):
        DiLoCo(small_model(), group="all")


def resumed(kind: str, rank: int, member: int) -> tuple[int, list[str], float]:
    """Train 4 steps, and 6 in a later attempt. Return the optimizer's steps, the types of its states, and the loss."""
    plain = small_model()
    model = wrapped(plain, kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    diloco = DiLoCo(model, inner_steps=2, total_steps=10, snapshot_every=1)
    generator = torch.Generator().manual_seed(member)
    diloco.attach_state("optimizer", optimizer)
    diloco.attach_state("random", generator)
    data = torch.Generator().manual_seed(7)
    drawn = 0.0
    for step in diloco.steps():
        inner_step(model, optimizer, data)
        drawn = float(torch.rand(1, generator=generator))
        diloco.step()
        if step == 3 and current_replica().attempt == 0:
            diloco.__exit__(RuntimeError, RuntimeError(), None)
            if member == 0:
                diloco._plain._workers.uploads.finish()  # type: ignore[attr-defined]
            break
    else:
        diloco.close()
    state = optimizer.state[next(iter(model.parameters()))]
    return int(state["step"]), sorted(type(value).__name__ for value in state.values()), drawn


@each_kind
def test_all_members_of_a_restarted_replica_continue_with_their_states(kind: str, tmp_path: Path) -> None:
    def body(rank: int, member: int) -> Any:
        return resumed(kind, rank, member)

    first = run_members(tmp_path, [2], body)
    assert [found[0] for found in first.values()] == [4, 4], first
    store = store_at(f"file://{tmp_path}/store")
    owners = {entry.key.split("/own/")[1].split("/")[0] for entry in store.list("run/diloco/main/own/")}
    assert owners == {"0", "0.1"}
    second = run_members(tmp_path, [2], body, attempt=1)
    for (rank, member), found in second.items():
        assert found[:2] == (10, first[rank, member][1]), "the optimizer continues, and its states have the same types"
        generator = torch.Generator().manual_seed(member)
        draws = [float(torch.rand(1, generator=generator)) for _ in range(10)]
        assert found[2] == draws[-1], "each member has its own random numbers"


@shards_on_cpus
def test_a_state_that_one_member_lacks_is_loaded_in_no_member(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> Any:
        return resumed("sharded", rank, member)

    run_members(tmp_path, [2], body)
    store = store_at(f"file://{tmp_path}/store")
    for entry in list(store.list("run/diloco/main/own/0.1/")):
        store.delete(entry.key)
    second = run_members(tmp_path, [2], body, attempt=1)
    assert [found[0] for found in second.values()] == [6, 6], second


def test_without_a_process_group_the_processes_of_a_replica_are_refused() -> None:
    from diloco.errors import DiLoCoError
    from diloco.rendezvous.run_location import find_location

    place = find_location(None, None, None, None)
    for environ in (
        {"REPLICA_MEMBER": "1", "REPLICA_MEMBERS": "4"},
        {"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"},
    ):
        with pytest.raises(DiLoCoError) as caught:
            find_group("auto", place, None, "main", environ)
        assert str(caught.value) == (
            "4 processes of this replica open a DiLoCo, and have no process group: call "
            "torch.distributed.init_process_group() before, or open it in member 0 alone: DiLoCo(model, group=None)."
        )
    assert find_group("auto", place, 0, "main", {"RANK": "0", "WORLD_SIZE": "4"}) is None
    for environ in ({}, {"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "two"}):
        assert find_group("auto", place, None, "main", environ) is None


@shards_on_cpus
def test_the_search_for_early_copies_in_the_leader_reads_no_shards(tmp_path: Path) -> None:
    """To read a value of a DTensor, all processes of its mesh must call. The others would wait for ever."""

    def body(rank: int, member: int) -> int:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(rank)  # so that the first anchor changes the values of one replica
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
        if rank == 1:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        diloco = DiLoCo(model, inner_steps=1, total_steps=3)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in diloco.steps():
            model(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
        diloco.close()
        return diloco.rounds

    assert run_members(tmp_path, [1, 2], body) == {(0, 0): 3, (1, 0): 3, (1, 1): 3}
