"""What an entrypoint may return, and what it is told when it returns something else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from executors import LocalProcessExecutor, launch
from executors.errors import ReplicaFailedError


def test_json_values_come_back_as_they_were(local: LocalProcessExecutor) -> None:
    value = {"a": [1, -2.5, 1e300, True, None, "ä\n🦦\0"], "": {}, "nested": {"deep": [[[]]]}, "big": 2**70}
    assert launch(local, lambda: value, 1).results() == [value]


def test_nothing_is_a_result(local: LocalProcessExecutor) -> None:
    run = launch(local, lambda: None, 1)
    assert run.results() == [None]
    assert [(outcome.status, outcome.reason) for outcome in run.outcomes()] == [("succeeded", None)]


def test_tuples_become_lists(local: LocalProcessExecutor) -> None:
    def entrypoint() -> Any:
        from collections import namedtuple

        point = namedtuple("point", "x y")
        return {"pair": (1, (2, 3)), "named": point(4, 5)}

    assert launch(local, entrypoint, 1).results() == [{"pair": [1, [2, 3]], "named": [4, 5]}]


def test_scalars_of_numpy_and_torch_become_numbers() -> None:
    def entrypoint() -> Any:
        import numpy
        import torch

        return {
            "numpy": [numpy.float32(0.5), numpy.float64(0.25), numpy.int64(-3), numpy.bool_(True), numpy.array(7)],
            "torch": [
                torch.tensor(0.5),
                torch.tensor([3]),
                torch.tensor(True),
                torch.tensor(1.5, dtype=torch.bfloat16),
            ],
            "one": numpy.array([[2.0]]),
        }

    (result,) = launch(LocalProcessExecutor(preload=("torch",)), entrypoint, 1).results()
    assert result == {"numpy": [0.5, 0.25, -3, True, 7], "torch": [0.5, 3, True, 1.5], "one": 2.0}
    assert [type(number) for number in result["numpy"]] == [float, float, int, bool, int]
    assert [type(number) for number in result["torch"]] == [float, int, bool, float]


def test_a_tensor_is_refused_with_its_path() -> None:
    def entrypoint() -> Any:
        import torch

        return {"loss": [0.1, 0.2, 0.3, torch.zeros(2)]}

    with pytest.raises(ReplicaFailedError, match=r"result\['loss'\]\[3\] is a Tensor") as caught:
        launch(LocalProcessExecutor(preload=("torch",)), entrypoint, 1).results()
    assert "current_replica().save_artifact" in str(caught.value)
    assert caught.value.outcome is not None
    assert caught.value.outcome.reason == "result_not_serializable"


CASES: dict[str, tuple[Any, str]] = {
    "a set": ({"names": {1}}, r"result\['names'\] is a set"),
    "bytes": ([b"x"], r"result\[0\] is a bytes"),
    "a function": ({"f": [len]}, r"result\['f'\]\[0\]"),
    "a key that is no string": ({"a": {1: "x"}}, r"result\['a'\] has the key 1"),
    "a tuple as key": ({("a", "b"): 1}, r"result has the key \('a', 'b'\)"),
    "a complex number": (1j, r"result is a complex"),
}


@pytest.mark.parametrize(("value", "words"), CASES.values(), ids=CASES.keys())
def test_what_is_no_json_is_refused_with_its_path(local: LocalProcessExecutor, value: Any, words: str) -> None:
    run = launch(local, lambda: value, 1)
    with pytest.raises(ReplicaFailedError, match=words):
        run.results()
    assert run.outcomes()[0].reason == "result_not_serializable"


def test_a_list_that_contains_itself_is_refused(local: LocalProcessExecutor) -> None:
    def entrypoint() -> Any:
        circle: list[Any] = []
        circle.append(circle)
        return circle

    run = launch(local, entrypoint, 1)
    run.wait()
    assert run.outcomes()[0].reason == "result_not_serializable"


def test_numbers_that_json_has_no_word_for_come_back_or_are_refused(local: LocalProcessExecutor) -> None:
    run = launch(local, lambda: {"loss": [math.inf, -math.inf, math.nan]}, 1)
    run.wait()
    (outcome,) = run.outcomes()
    if outcome.status == "succeeded":
        plus, minus, nan = outcome.result["loss"]
        assert (plus, minus) == (math.inf, -math.inf)
        assert math.isnan(nan)
    else:
        assert "result['loss'][0]" in (outcome.error or "")


def test_an_integer_too_long_for_json_leaves_an_outcome_that_says_so(local: LocalProcessExecutor) -> None:
    run = launch(local, lambda: {"n": 10**10_000}, 1)
    run.wait()
    (outcome,) = run.outcomes()
    assert outcome.status == "succeeded" or outcome.reason == "result_not_serializable"


def test_text_that_is_no_unicode_comes_back_or_is_refused(local: LocalProcessExecutor) -> None:
    run = launch(local, lambda: "lone \udcff surrogate", 1)
    run.wait()
    (outcome,) = run.outcomes()
    assert outcome.result == "lone \udcff surrogate" or outcome.reason == "result_not_serializable"


def test_a_generator_or_a_coroutine_function_is_not_silently_a_success(local: LocalProcessExecutor) -> None:
    async def entrypoint() -> int:
        return 1

    run = launch(local, entrypoint, 1)
    run.wait()
    (outcome,) = run.outcomes()
    assert outcome.result == 1 or outcome.status == "failed"


# --- arguments


def test_arguments_of_a_hundred_megabytes_travel(local: LocalProcessExecutor) -> None:
    blob = bytes(range(256)) * (100 * 4096)

    def entrypoint(blob: bytes) -> list[int]:
        return [len(blob), blob[-1]]

    assert launch(local, entrypoint, 2, args={"blob": blob}).results() == [[len(blob), 255]] * 2


def test_a_large_json_argument_of_a_named_entrypoint_travels(local: LocalProcessExecutor) -> None:
    text = "ä" * 3_000_000
    (result,) = launch(local, "executors.testing.tasks:echo", 1, args={"text": text}).results()
    assert result["args"]["text"] == text


def test_a_function_that_cannot_be_pickled_is_refused_before_anything_starts(local: LocalProcessExecutor) -> None:
    import threading

    from executors import list_runs
    from executors.errors import EntrypointError

    lock = threading.Lock()

    def entrypoint() -> None:
        lock.acquire()

    with pytest.raises(EntrypointError, match=r"entrypoint.*cannot be pickled"):
        launch(local, entrypoint, 1)
    assert list_runs() == []


def test_methods_partials_and_callable_objects_are_entrypoints(local: LocalProcessExecutor) -> None:
    import functools

    class Trainer:
        def __init__(self, width: int) -> None:
            self.width = width

        def fit(self, steps: int) -> int:
            return self.width * steps

        def __call__(self, steps: int) -> int:
            return self.width + steps

    trainer = Trainer(10)
    for entrypoint, result in (
        (trainer.fit, 30),
        (trainer, 13),
        (functools.partial(trainer.fit, steps=3), 30),
        (functools.partial(trainer.fit), 30),
    ):
        assert launch(local, entrypoint, 1, args={"steps": 3}).results() == [result]


def test_what_was_unpickled_is_a_copy(local: LocalProcessExecutor) -> None:
    numbers = [1]

    def entrypoint(given: list[int]) -> int:
        given.append(2)
        numbers.append(3)
        return len(given) + len(numbers)

    assert launch(local, entrypoint, 2, args={"given": [0]}).results() == [4, 4]
    assert numbers == [1]
