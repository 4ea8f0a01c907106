"""The command `rlstructs`."""
