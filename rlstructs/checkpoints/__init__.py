"""Checkpoints of a training; `rlstructs.Checkpoint` is what programs use."""
