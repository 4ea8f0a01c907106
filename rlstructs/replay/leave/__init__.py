"""What a store hands out."""
