"""Batches that a store hands out."""
