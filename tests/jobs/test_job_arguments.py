"""Scripts and arguments of the command line in replicas on other machines, where the launcher's files are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_jobs import FakeExecutor, Machines

from executors import attach, launch
from executors.errors import EntrypointArgumentsError, EntrypointError
from executors.launcher import plan_launch
from executors.registry.run_index import local_store
from executors.run.run import view_of
from executors.task.launch_request import LaunchRequest

ANNOTATED = """
import enum
from pathlib import Path

class Mode(enum.Enum):
    FAST = "f"

def main(out: Path, mode: Mode, on: bool = True):
    return [type(out).__name__, mode.name, on]

async def fetch(): ...
"""
SCRIPT = "import sys\nfrom executors import current_replica\nprint('ran', sys.argv, current_replica().rank)\n"


@pytest.mark.usefixtures("machines")
def test_a_job_converts_texts_to_the_types_of_the_annotations() -> None:
    Path("annotated.py").write_text(ANNOTATED)
    texts = {"out": "a/b", "mode": "FAST", "on": "no"}
    request = LaunchRequest.of("annotated.py", n=1, arg_texts=texts)
    assert plan_launch(request, FakeExecutor()).start().results() == [["PosixPath", "FAST", False]]


def test_replicas_that_see_this_machine_meet_where_the_variable_says_or_in_the_state_directory(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machines.is_held = True

    def places() -> set[str]:
        run = launch(FakeExecutor(), "job.py:main", 1)
        (handle,) = FakeExecutor().launch_replicas(1, "job.py:main", {})
        return {view_of(run).store.url, handle.metadata["store_url"]}

    assert places() == {local_store().url}
    monkeypatch.setenv("REPLICAS_RENDEZVOUS", str(tmp_path / "shared"))
    assert places() == {(tmp_path / "shared").as_uri()}
    request = LaunchRequest.of("job.py:main", n=1)
    assert plan_launch(request, "inline").request.rendezvous is None, (
        "the variable is not used, because it is for replicas on other machines"
    )


def test_a_run_in_a_directory_is_the_same_run_by_a_link_to_it(machines: Machines, tmp_path: Path) -> None:
    machines.is_held = True
    place, link = tmp_path / "disk" / "runs", tmp_path / "home"
    launch(FakeExecutor(), "job.py:main", 1, run_id="otter", rendezvous=str(place), detach=True)
    link.symlink_to(place.parent)
    by_link = attach(f"{link}/runs/otter", executor=FakeExecutor())
    assert view_of(by_link).store.url != place.as_uri()
    (replica,) = by_link.status().replicas
    assert (str(replica.status), replica.doing) == ("pending", "scheduling")
    by_link.cancel()
    assert machines.living() == []


def test_a_service_may_have_no_limit_of_its_own_by_default(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(FakeExecutor(), "job.py:main", 1)
    monkeypatch.setattr(FakeExecutor, "default_timeout_s", None)
    run = launch(FakeExecutor(), "job.py:main", 1)
    assert run.results() == [{"rank": 0}]
    limited, free = (made.job for made in machines.jobs)
    assert (limited.limit_s, free.limit_s) == (3600 + 900, None)
    assert ["REPLICA_TIMEOUT_S" in job.env for job in (limited, free)] == [True, False]
    assert (view_of(run).record.placements[0].timeout_s, view_of(run).reader.handles.of(0).metadata["timeout_s"]) == (
        None,
        None,
    )


def test_a_script_runs_in_a_job_with_its_argv(machines: Machines) -> None:
    Path("script.py").write_text(SCRIPT)
    run = launch(FakeExecutor(), "script.py", 2, argv=["--lr", "1e-3"])
    assert run.results() == [None, None]
    for rank in range(2):
        assert f"ran ['script.py', '--lr', '1e-3'] {rank}" in run.logs(rank=rank)


def test_a_request_that_cannot_work_is_refused_before_a_job_is_started(machines: Machines) -> None:
    Path("annotated.py").write_text(ANNOTATED)
    request = LaunchRequest.of("annotated.py", n=1, arg_texts={"out": "a", "mode": "SLOW"})
    with pytest.raises(EntrypointArgumentsError, match=r"--arg mode=SLOW: main\(\) takes mode as one of FAST"):
        plan_launch(request, FakeExecutor())
    with pytest.raises(EntrypointError, match=r"fetch\(\) is async"):
        launch(FakeExecutor(), "annotated.py:fetch", 1)
