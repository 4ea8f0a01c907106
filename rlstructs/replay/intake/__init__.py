"""What comes into a store."""
