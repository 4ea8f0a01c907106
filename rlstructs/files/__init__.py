"""File formats: what is written and read, whatever class it belongs to."""
