"""Draw all pictures again, or those that are named: `python -m docs.pictures [NAME…]`."""

from __future__ import annotations

import importlib
import sys

from docs.pictures import FOLDER, RECIPES


def main(names: list[str]) -> None:
    """Run recipes, and print each file that they wrote.

    Args:
        names: The names of recipes. Empty: all.
    """
    if unknown := set(names) - set(RECIPES):
        raise SystemExit(f"There is no picture {sorted(unknown)[0]!r}. Pictures: {', '.join(RECIPES)}.")
    for name in names or RECIPES:
        for path in importlib.import_module(f"docs.pictures.{name}").write(FOLDER):
            print(path)


if __name__ == "__main__":  # local replicas are forked from a process that imports the main module
    main(sys.argv[1:])
