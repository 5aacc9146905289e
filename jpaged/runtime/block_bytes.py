"""BlockBytes: blocks of the pools as bytes in files, the same whether a replica is one device or
several that other replicas lie beside.
"""

import math
from collections.abc import Buffer, Sequence
from typing import Any

import numpy as np

from jpaged.models.record import Field
from jpaged.runtime.kv_cache import PoolSpec


class BlockBytes:
    """A BlockCodec. Of a block the fields of its record come one after another, each an array [L,
    *field.shape] of all devices together, in C order.

    pools: one a group. shares: where blocks move as a list of the devices' shares of a field, of
    how many; None where they move whole (see Transfers).
    """

    def __init__(self, pools: Sequence[PoolSpec], shares: int | None):
        self._shares = shares
        self._layers = [pool.num_layers for pool in pools]
        self._fields = [pool.record.fields for pool in pools]
        self._sizes = [pool.block_bytes for pool in pools]

    def stored_bytes(self, group: int) -> int:
        return self._sizes[group]

    def block_to_bytes(self, group: int, data: Any) -> list[Buffer]:
        pieces = [self._whole(field, data[field.name]) for field in self._fields[group]]
        return [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in pieces]

    def block_from_bytes(self, group: int, raw: Buffer) -> Any:
        layers, start, block = self._layers[group], 0, dict[str, Any]()
        for field in self._fields[group]:
            dtype, count = np.dtype(field.dtype), layers * math.prod(field.shape)
            flat = np.frombuffer(raw, dtype, count, start)
            start += flat.nbytes
            block[field.name] = self._split(field, flat.reshape(layers, *field.shape))
        return block

    def _whole(self, field: Field, data: Any) -> np.ndarray:
        if not isinstance(data, list):
            return data
        if field.split is None:
            return data[0]  # every device has it whole
        return np.concatenate(data, axis=1 + field.split)

    def _split(self, field: Field, whole: np.ndarray) -> Any:
        if self._shares is None:
            return whole
        if field.split is None:
            return [whole] * self._shares
        return np.split(whole, self._shares, axis=1 + field.split)
