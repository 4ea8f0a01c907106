"""Saves and restores environments, agents and jobs in the middle of their work."""
