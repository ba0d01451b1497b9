"""The verb `dashboard`, which serves runs as pages that update themselves."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

from typer import Option

from executors.cli.documents import DashboardDocument
from executors.cli.output import JsonOption, Output
from executors.cli.verb_help import describe

STORE = "The directory or URL whose runs are shown, as in s3://BUCKET/runs. Default: the runs that this machine knows."
PORT = "The port of the page. 0 takes any free port."
HOST = "The address to listen on. Other machines reach an address that is not 127.0.0.1, without encryption."
READ_ONLY = "Show no buttons, and refuse to stop, cancel or resume runs."
OPEN = "Also show the page in the browser."


@describe(
    examples=["replicas dashboard", "replicas dashboard --store s3://BUCKET/runs --open"],
    exit_codes={0: "Ctrl-C ended the dashboard."},
)
def dashboard(
    store: Annotated[str | None, Option("--store", metavar="URL", help=STORE)] = None,
    port: Annotated[int, Option("--port", min=0, max=65535, help=PORT)] = 8265,
    host: Annotated[str, Option("--host", metavar="ADDRESS", help=HOST)] = "127.0.0.1",
    read_only: Annotated[bool, Option("--read-only", help=READ_ONLY)] = False,
    open_it: Annotated[bool, Option("--open", help=OPEN)] = False,
    as_json: JsonOption = False,
) -> int:
    """Serve runs as pages in a browser, which update themselves.

    The address has a random token, and only a browser that opened it gets pages. Ctrl-C ends the dashboard, and the
    runs continue. With --json, the command prints the address as a document, and serves.
    """
    import webbrowser

    from executors.dashboard.access import LOOPBACK
    from executors.dashboard.server import Dashboard, Options, can_open_browser, forward_line

    output = Output(as_json)
    made = Dashboard(Options(store=store, host=host, port=port, is_read_only=read_only))
    address = made.address()

    def show() -> None:
        output.print(f"Dashboard: {address}", "bold")
        if host not in LOOPBACK:
            text = "Pages and the token travel without encryption. Use this only in a network that you trust."
            output.print(text, "yellow")
        elif not can_open_browser():
            output.print(f"From your own machine, forward the port first: {forward_line(made)}", "dim")
        output.print("Ctrl-C ends the dashboard. The runs continue.", "dim")
        if as_json:
            document: DashboardDocument = {"url": address, "port": made.port, "read_only": read_only}
            output.document(document)
        sys.stdout.flush()  # a program that reads the address waits for it
        if open_it and can_open_browser():
            webbrowser.open(address)

    with contextlib.suppress(KeyboardInterrupt):
        made.serve(on_start=show)
    return 0
