"""Searches over several sequences of one prompt, steered from outside the scheduler."""
