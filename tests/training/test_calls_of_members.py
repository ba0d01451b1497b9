"""The processes of one replica whose calls or errors differ: no member waits for ever, and errors name the cause."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.members import each_kind, inner_step, run_members, small_model, wrapped

from diloco import DiLoCo
from diloco.errors import DiLoCoError


def raised_by(act: Callable[[], object]) -> str:
    """Return the error of a call and its notes as one text."""
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - the test reads its text
        return " | ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "no error"


class Breaks:
    """An object to attach that fails in one of its calls."""

    def __init__(self, at: str) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        if self.at == "state_dict":
            raise ValueError("no state today")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("no state was saved")


def test_a_member_that_ends_its_loop_alone_is_named_with_both_calls(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> str:
        diloco = DiLoCo(small_model(), inner_steps=4)

        def train() -> None:
            for step in range(8):
                if member == 1 and step == 2:
                    break
                diloco.step()
            diloco.close()

        return raised_by(train)

    for text in run_members(tmp_path, [2], body).values():
        assert text == (
            "DiLoCoError: Member 1 of this replica calls close() as call 4 of its DiLoCo, and member 0 calls step() as "
            "call 4. All members must make the same calls in the same order: do not end the loop of one member alone."
        )


def test_a_leader_that_ends_its_loop_alone_gets_the_same_error(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> str:
        diloco = DiLoCo(small_model(), inner_steps=4, allow_no_rounds=True)
        if member == 1:
            diloco.step()
            return raised_by(diloco.step)
        diloco.step()
        return raised_by(diloco.close)

    for text in run_members(tmp_path, [2], body).values():
        assert "Member 1 of this replica calls step() as call 3 of its DiLoCo, and member 0 calls close()" in text


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
@pytest.mark.parametrize("member_that_fails", [0, 1])
def test_an_error_of_a_weight_function_is_raised_in_all_members(
    kind: str, member_that_fails: int, tmp_path: Path
) -> None:
    def body(rank: int, member: int) -> list[str]:
        is_bad = [True]

        def weigh() -> float:
            if member == member_that_fails and is_bad:
                is_bad.clear()
                raise KeyError("no tokens")
            return 2.0

        model = wrapped(small_model(), kind)
        diloco = DiLoCo(model, inner_steps=1, weight=weigh)
        first = raised_by(diloco.step)
        return [first, raised_by(diloco.state_dict)]  # later calls still belong together

    for found in run_members(tmp_path, [2], body).values():
        expected = f"KeyError: 'no tokens' | It was raised in member {member_that_fails} of this replica."
        assert found == [expected, "no error"]


@pytest.mark.parametrize(
    ("value", "words"), [(-1.0, "got -1.0"), (True, "got True"), ("many", "got 'many'"), (float("nan"), "got nan")]
)
def test_an_invalid_weight_is_refused_in_all_members_with_the_number_of_the_member(
    value: Any, words: str, tmp_path: Path
) -> None:
    def body(rank: int, member: int) -> str:
        return raised_by(DiLoCo(small_model(), inner_steps=1, weight=lambda: value if member else 2.0).step)

    for text in run_members(tmp_path, [2], body).values():
        assert "Member 1 of this replica: weight must return a number that is not negative, " + words in text


@pytest.mark.parametrize("member_that_fails", [0, 1])
def test_an_object_that_one_member_cannot_attach_is_refused_in_all(member_that_fails: int, tmp_path: Path) -> None:
    def body(rank: int, member: int) -> list[str]:
        diloco = DiLoCo(small_model(), inner_steps=1)
        thing = Breaks("state_dict" if member == member_that_fails else "")
        first = raised_by(lambda: diloco.attach_state("thing", thing))
        return [first, raised_by(lambda: diloco.attach_state("thing", Breaks(""))), raised_by(diloco.step)]

    for found in run_members(tmp_path, [2], body).values():
        assert found[0].startswith("ValueError: no state today")
        assert found[1:] == ["no error", "no error"]


@pytest.mark.parametrize("member_that_fails", [0, 1])
def test_an_error_in_the_state_dict_of_one_member_is_raised_in_all_members(
    member_that_fails: int, tmp_path: Path
) -> None:
    def body(rank: int, member: int) -> str:
        diloco = DiLoCo(small_model(), inner_steps=1)
        thing = Breaks("")
        diloco.attach_state("thing", thing)
        thing.at = "state_dict" if member == member_that_fails else ""
        return raised_by(diloco.step)

    for text in run_members(tmp_path, [2], body).values():
        assert text.startswith("ValueError: no state today")


def test_members_that_attach_other_objects_are_refused(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> str:
        diloco = DiLoCo(small_model(), inner_steps=1)
        return raised_by(lambda: diloco.attach_state(f"thing{member}", Breaks("")))

    for text in run_members(tmp_path, [2], body).values():
        assert "Member 1 of this replica attaches 'thing1', and member 0 attaches 'thing0'." in text


@each_kind
def test_a_member_that_leaves_by_an_error_of_its_own_is_named_in_the_others(kind: str, tmp_path: Path) -> None:
    def body(rank: int, member: int) -> str:
        model = wrapped(small_model(), kind)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def train() -> None:
            with DiLoCo(model, inner_steps=1) as diloco:
                inner_step(model, optimizer, torch.Generator().manual_seed(1))
                if member == 1:
                    raise KeyError("of member 1")
                diloco.step()

        return raised_by(train)

    found = run_members(tmp_path, [2], body)
    assert found[0, 1] == "KeyError: 'of member 1'"
    assert found[0, 0].startswith(
        "DiLoCoError: Member 1 of this replica has left the DiLoCo after KeyError: 'of member 1'"
    )


def test_a_member_that_has_ended_is_an_error_that_names_the_call(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> str:
        diloco = DiLoCo(small_model(), inner_steps=1)
        if member == 1:
            os._exit(0)
        with pytest.raises(DiLoCoError) as caught:
            diloco.step()
        return str(caught.value)

    text = run_members(tmp_path, [2], body)[0, 0]
    assert text.startswith("Member 0 of this replica waited in step(), call 2 of its DiLoCo, for another member, which")
