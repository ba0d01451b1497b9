"""Verbs on runs that are damaged, named in odd ways, or somebody else's."""

from __future__ import annotations

from pathlib import Path

from support.cli import HereInstead

from executors import LocalProcessExecutor, launch


def test_a_rank_whose_records_cannot_be_read_is_named_and_the_others_are_shown(
    here: HereInstead, local: LocalProcessExecutor, state_home: Path
) -> None:
    launch(local, "job:main", 4, run_id="mine").wait()
    records = state_home / "replicas" / "mine" / "replicas"
    (records / "0001" / "0" / "outcome.json").write_text("{}")
    (records / "0002" / "0" / "outcome.json").unlink()
    (records / "0002" / "0" / "handle.json").write_text("{}")
    for verb in ("status", "wait", "collect"):
        told = here.replicas(verb, "mine")
        assert told.code == (0 if verb == "status" else 1), told
        assert "'mine/replicas/0001/0/outcome.json' in file://" in told.stdout
        assert "'mine/replicas/0002/0/handle.json' in file://" in told.stdout
        row = here.replicas(verb, "mine", "--json").json
        assert row["exit_code"] == 1
        assert [row["replicas"][rank]["status"] for rank in (0, 3)] == ["succeeded"] * 2
    assert here.replicas("collect", "mine", "--out", "out").code == 1
    assert (here.folder.path / "out" / "3" / "output.log").exists()
    told = here.replicas("logs", "mine")
    assert "Note: Rank 2: 'mine/replicas/0002/0/handle.json'" in told.stderr
    assert here.replicas("rm", "mine").code == 0
