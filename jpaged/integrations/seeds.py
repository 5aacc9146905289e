"""Seeds of what is named: a row or a line that is run again, anywhere, gives the same text."""

import xxhash


def stable_seed(seed: int, name: str) -> int:
    """Return the seed of something of this name in a run of this seed: 63 bits, which a signed
    64-bit seed holds.
    """
    return xxhash.xxh64_intdigest(f"{seed} {name}".encode(errors="backslashreplace")) >> 1
