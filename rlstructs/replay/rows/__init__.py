"""Bytes and lanes of a store."""
