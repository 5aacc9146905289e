"""Random keys on the host: threefry2x32 over two Python ints, equal to jax.random's key and
fold_in.

A request's key is fixed at admission, without a device call. Source: Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3" (SC 2011), 20 rounds.
"""

Key = tuple[int, int]

_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def key_from_seed(seed: int) -> Key:
    """Return the key data of jax.random.key(seed); 64 bits of the seed count."""
    return (seed >> 32) & _MASK, seed & _MASK


def fold_in(key: Key, data: int) -> Key:
    """Return the key data of jax.random.fold_in(key, data), which is threefry of (0, data) under
    the key; 32 bits of data count.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = schedule[0], (data + schedule[1]) & _MASK
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            x = (x + y) & _MASK
            y = ((y << rotation | y >> (32 - rotation)) & _MASK) ^ x
        x = (x + schedule[(i + 1) % 3]) & _MASK
        y = (y + schedule[(i + 2) % 3] + i + 1) & _MASK
    return x, y
