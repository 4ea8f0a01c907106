"""What is drawn from a store."""
