"""How the code of a run reaches another machine."""
