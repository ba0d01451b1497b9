"""A smoke test for CI: two replicas train for a few steps, and the loss must fall. Run it with pytest."""

from executors import launch


def test_training_runs_on_two_replicas() -> None:
    with launch("local", "diloco.demo:train", n=2, args={"steps": 40}, timeout=300) as run:
        results = run.results()
    assert results[0]["loss"] < results[0]["loss_before"]
