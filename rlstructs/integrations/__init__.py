"""Adapters for programs that people already run; each module needs the package that it is named after."""
