"""The replay buffers: rlberry's, tianshou's and torchrl's interfaces over the one store."""
