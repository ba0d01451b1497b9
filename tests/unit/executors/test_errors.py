"""Messages that several errors share."""

from __future__ import annotations

from executors.errors import did_you_mean, unknown_name


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known_ones() -> None:
    assert unknown_name("backend", "modla", ["modal", "hf"]) == (
        "No backend 'modla'. Did you mean 'modal'? Known: hf, modal."
    )
    assert unknown_name("option", "x", []) == "No option 'x'. Known: none."
    assert did_you_mean("nothing like it", ["modal", "hf"]) == ""
