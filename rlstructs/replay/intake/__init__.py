"""Conversion of rows that come into a store."""
