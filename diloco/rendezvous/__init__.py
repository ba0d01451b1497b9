"""The protocol by which replicas meet in a store. Knows no torch."""
