"""Adapters for torch, jax and warp, with one protocol: `framework.Framework`."""
