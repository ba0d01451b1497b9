"""The pages of the documentation, and the code that builds the site from them: see `conf.py`."""
