"""Serves until the end of stdin: `python -m executors.dashboard STORE RUN`. `beside.py` starts it."""

from __future__ import annotations

import json
import sys
import threading

from executors.errors import ReplicasError


def main(store_url: str, run_id: str) -> int:
    """Serve the runs of this machine, and print the address of a run's page as one line of JSON.

    Args:
        store_url: the url of the run's store.
        run_id: the run.
    """
    from executors.dashboard.server import Dashboard, Options, can_open_browser, forward_line

    try:
        dashboard = Dashboard(Options(takes_other_port=True))
    except ReplicasError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1

    def wait_for_end() -> None:
        sys.stdin.read()
        dashboard.stop()

    def show() -> None:
        begun = {
            "url": dashboard.address((store_url, run_id)),
            "has_browser": can_open_browser(),
            "forward": forward_line(dashboard),
        }
        print(json.dumps(begun), flush=True)
        threading.Thread(target=wait_for_end, daemon=True).start()

    dashboard.serve(on_start=show)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
