"""A run as one page: what it was, what it cost, how the loss went. Sees records and rows, never a `Run`."""
