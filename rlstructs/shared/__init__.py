"""The shared memory that the trainer and its workers map."""
