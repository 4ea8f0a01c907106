"""What torch, jax and warp call things: one protocol, and an adapter for each."""
