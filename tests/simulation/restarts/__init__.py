"""Decisions, controllers and what they start, under a simulated scheduler."""
