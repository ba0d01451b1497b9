"""Processes that see as little of this machine as a container does."""
