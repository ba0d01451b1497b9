"""A local Modal that runs sandboxes as processes."""
