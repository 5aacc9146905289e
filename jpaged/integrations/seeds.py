"""Seeds from names: a row or line that is run again, anywhere, gets the same text."""

import xxhash


def stable_seed(seed: int, name: str) -> int:
    """Return the seed of a name in a run with this seed. It has 63 bits, which fit a signed 64-bit
    integer.
    """
    return xxhash.xxh64_intdigest(f"{seed} {name}".encode(errors="backslashreplace")) >> 1
