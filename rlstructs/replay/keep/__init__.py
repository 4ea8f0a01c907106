"""What a store leaves in files."""
