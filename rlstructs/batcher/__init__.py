"""The trainer's side of a rollout: `RL_Batcher`, and what it is made of."""
