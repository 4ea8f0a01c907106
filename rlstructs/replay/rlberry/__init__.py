"""rlberry's replay buffer: chunks of episodes, and tags."""
