"""Settings that a worker takes over from its parent, and the log records that it sends back."""
