"""torchrl's replay buffers: storages, samplers, writers and transforms."""
