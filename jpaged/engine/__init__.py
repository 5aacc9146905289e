"""The host side: plain Python over ints. Nothing in here imports jax."""
