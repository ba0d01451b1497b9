"""The measurements of replicas over time, kept in write-once segments: see `rows`, `recorder` and `metrics`."""
