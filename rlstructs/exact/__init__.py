"""An environment, an agent or a worker's job in the middle of its work: how each is saved, and brought back."""
