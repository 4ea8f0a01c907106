"""Prepares workers before their first request: libraries' settings, registered environments, random streams."""
