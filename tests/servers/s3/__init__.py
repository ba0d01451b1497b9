"""Local S3 servers, with and without faults."""
