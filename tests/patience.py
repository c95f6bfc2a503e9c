"""How long tests wait for a condition before they call it a hang. Nothing is expected to take that long; a busy machine
may be many times slower than a quiet one, and must not fail a test."""

PATIENCE = 900  # seconds
