"""CPU kernels in C++, called through XLA's FFI: what XLA:CPU itself cannot do fast. Knows nothing
of jpaged.
"""
