"""Writes the pages of the reference from the code: a fact that the code has is written once.

Read `pages.py` first: it lists each generated page with the function that makes it. `api.py` reads the public Python
objects with griffe, which imports nothing. The other modules import the command, the settings, the errors and the
records. `conf.py` calls `write_pages` before each build of the site.
"""
