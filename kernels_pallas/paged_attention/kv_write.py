"""INTERIM stand-in (being replaced)."""


def write_kv(pool, layer, kv, slots, *, num_layers=1):
    n, p = pool.shape[0] // num_layers, pool.shape[1]
    flat = pool.reshape(-1, *pool.shape[2:])
    return flat.at[layer * n * p + slots].set(kv, mode="drop", unique_indices=True).reshape(pool.shape)
