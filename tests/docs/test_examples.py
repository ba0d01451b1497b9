"""The examples run without changes: the notebook in a real kernel, the smoke test under pytest."""

from __future__ import annotations

import ast
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

SHOWN = """
run = launch("local", train, n=2, args={"steps": 10_000, "pause_s": 0.01})
run.show()
"""
CANCELLED = """
run.cancel()
import threading
[thread.name for thread in threading.enumerate() if thread.name == "replicas-show"]
"""
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The quickstart, executed cell by cell, and after it a run that is shown and then cancelled."""
    folder = tmp_path_factory.mktemp("notebook")
    kernels = folder / "share" / "jupyter" / "kernels" / "here"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": command, "display_name": "here", "language": "python"}
    (kernels / "kernel.json").write_text(json.dumps(kernel))
    environment = {"JUPYTER_PATH": str(folder / "share" / "jupyter"), "XDG_STATE_HOME": str(folder / "state")}
    environment |= {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        document = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)  # type: ignore[no-untyped-call]
        document.cells += [nbformat.v4.new_code_cell(source) for source in (SHOWN, CANCELLED)]  # type: ignore[no-untyped-call]
        NotebookClient(document, timeout=100, kernel_name="here", resources={"metadata": {"path": folder}}).execute()
        yield document
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def output_of(document: Any, words: str, kind: str = "execute_result") -> Any:
    (cell,) = [cell for cell in document.cells if cell.cell_type == "code" and words in cell.source]
    (output,) = [output for output in cell.outputs if output.output_type == kind]
    return output.data["text/plain" if kind == "execute_result" else "text/html"]


def test_a_function_from_a_cell_runs_on_four_replicas(notebook: Any) -> None:
    results = ast.literal_eval(output_of(notebook, "def train(steps, pause_s"))
    assert [result["rank"] for result in results] == [0, 1, 2, 3]


def test_a_run_shows_itself_as_a_table(notebook: Any) -> None:
    cell = next(cell for cell in notebook.cells if cell.source == "run")
    html = cell.outputs[0].data["text/html"]
    assert html.count("succeeded") >= 4
    assert "<table>" in html


def test_all_cells_that_show_a_run_show_its_end_when_it_was_waited_for(notebook: Any) -> None:
    shown = [cell.outputs for cell in notebook.cells if cell.source.strip().endswith("run.show()")]
    first, again, cancelled = [str(output.data["text/html"]) for (output,) in shown]
    assert sorted(ast.literal_eval(output_of(notebook, "run.as_completed()"))) == [0, 1, 2, 3]
    assert "4 succeeded" in first
    assert first.count("200/200") == 4
    assert first == again
    assert "<polyline" in first
    assert all('class="in-short"' in html and "<script" not in html for html in (first, cancelled)), (
        "the output has the head of the page"
    )
    assert "2 cancelled" in cancelled
    assert output_of(notebook, "run.cancel()") == "[]", "no thread updates cells after the end of the run"


def test_a_process_that_waits_in_a_notebook_sees_how_far_the_run_is(notebook: Any) -> None:
    html = output_of(notebook, "progress=True", "display_data")
    assert html.count("400/400") == 4


def test_another_look_by_the_runs_id_gives_the_same_results(notebook: Any) -> None:
    assert ast.literal_eval(output_of(notebook, "attach(run.run_id)"))["rank"] == 3


def test_replicas_from_a_cell_train_one_model_together(notebook: Any) -> None:
    results = ast.literal_eval(output_of(notebook, "def train_together(steps)"))
    assert [result["rounds"] for result in results] == [40] * 4
    assert results[0]["error"] < 0.05


def test_the_notebook_is_shipped_without_outputs() -> None:
    document = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    assert not [cell for cell in document.cells if cell.get("outputs")]


def test_the_smoke_test_passes() -> None:
    runpy.run_path(str(EXAMPLES / "ci_smoke_test.py"))["test_training_runs_on_two_replicas"]()
