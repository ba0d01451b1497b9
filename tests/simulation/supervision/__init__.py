"""Decisions, keepers and what they start, under a simulated scheduler."""
