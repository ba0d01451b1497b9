"""The pictures of the documentation. Each module with a function `write` is the recipe of one picture.

`make pictures` runs all recipes, and `python -m docs.pictures round` runs one. Each recipe writes the picture twice,
for pages with a light and with a dark background. The pictures are in the repository, so that a build of the pages
needs no browser and no run.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
DRAWINGS = ("round", "life", "rooms")
"""The recipes of drawings. They always write the same text."""
RECORDINGS = ("status", "report", "dashboard")
"""The recipes that record a real run. The numbers differ each time. `report` and `dashboard` also need chromium."""
RECIPES = DRAWINGS + RECORDINGS
