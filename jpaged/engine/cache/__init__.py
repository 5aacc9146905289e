"""The host's half of the KV cache: blocks, their owners, their content, and a store beneath."""
