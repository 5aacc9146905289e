"""The decoder: one definition that trains (dense, causal) and serves (paged)."""
