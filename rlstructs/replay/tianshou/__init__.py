"""tianshou's replay buffers over the one store."""
