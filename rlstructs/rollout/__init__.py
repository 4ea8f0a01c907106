"""The worker's side: the rollout, and the job that keeps environments and agent."""
