"""Draws from a store."""
