"""The verb `report`, which writes a run as one HTML page or one JSON document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from executors.cli.options import BackendOptions, ExecutorOption, RendezvousOption, RunArgument, find_run, parse_path
from executors.cli.output import JsonOption, Output, raise_write_error
from executors.cli.verb_help import describe

OUT = "The file to write. Default: RUN_ID.html in the current folder."


@describe(examples=["replicas report RUN", "replicas report RUN --out run.html --open"])
def report(
    run: RunArgument,
    out: Annotated[Path | None, Option("--out", "-o", metavar="FILE", parser=parse_path, help=OUT)] = None,
    open_it: Annotated[bool, Option("--open", help="Also show the page in the browser.")] = False,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Write an HTML page about a run: cost, curves, time line, failures.

    The page is one file that needs no network. With --json, the command prints the same content as a document, and
    writes the page only if --out is given.
    """
    import webbrowser

    from executors.run.run import view_of
    from executors.view.report.page import write_page
    from executors.view.report.text import name_size
    from executors.view.run_page import report_document

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    with output.busy(f"Reading {found.run_id}"):
        document = report_document(view_of(found))
    path = out or Path(f"{found.run_id}.html")
    writes = out is not None or open_it or not as_json
    if writes:
        try:
            write_page(document, path)
        except OSError as error:
            raise_write_error(path, error)
        output.print(f"Wrote {path} ({name_size(path.stat().st_size)}).")
    if as_json:
        output.document(document)
    if open_it and not webbrowser.open(path.absolute().as_uri()):
        output.print(f"This machine has no browser. Copy the page to another machine: {path.absolute()}", "yellow")
    return 0
