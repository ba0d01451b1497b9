"""Asking a vendor again: as often as it helps, and as late as it wants."""

from __future__ import annotations

from typing import Literal

import pytest

from executors.vendor import VendorError
from executors.vendor_patience import FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_TOLD_S, TRIES, patiently


def pauses_before_giving_up(error: VendorError) -> list[float]:
    """Return how long one waits between the tries, when every one ends so."""
    slept: list[float] = []

    def fails() -> None:
        raise error

    with pytest.raises(VendorError) as raised:
        patiently(slept.append)(fails)
    assert raised.value is error
    return slept


@pytest.mark.parametrize("kind", ["busy", "unclear"])
def test_pauses_grow_to_a_limit(kind: Literal["busy", "unclear"]) -> None:
    slept = pauses_before_giving_up(VendorError("later", kind))
    assert len(slept) == TRIES - 1
    assert slept[0] < slept[-1] <= LONGEST_PAUSE_S + FIRST_PAUSE_S


def test_what_was_refused_is_not_asked_again() -> None:
    assert pauses_before_giving_up(VendorError("never", "refused")) == []


@pytest.mark.parametrize(("told_s", "least_s"), [(30.0, 30.0), (86_400.0, LONGEST_TOLD_S)])
def test_a_vendor_is_left_alone_as_long_as_it_says_but_not_for_ever(told_s: float, least_s: float) -> None:
    slept = pauses_before_giving_up(VendorError("later", "busy", retry_after_s=told_s))
    assert all(least_s <= pause <= least_s + FIRST_PAUSE_S for pause in slept)
