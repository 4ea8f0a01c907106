"""What runs in a worker: the rollout, and the job that keeps environments and agent."""
