"""What a run is about: its task and its record, as they are stored with it."""
