"""A run from outside: looked at, followed, cancelled, collected."""
