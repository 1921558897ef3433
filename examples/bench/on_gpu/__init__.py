"""The sections of gpu.py: each file measures one thing, and says what it found to a `Notes`."""
