"""Published checkpoints: reading, naming, loading."""
