"""Kernels that know nothing of jpaged: they take arrays and give arrays back."""
