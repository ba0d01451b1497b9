"""Helpers that several tests use: fake services, tasks for replicas, and ways to look at runs and processes."""
