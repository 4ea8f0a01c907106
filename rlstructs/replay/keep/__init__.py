"""Files of a store."""
