"""Running out of device memory, told in terms of the settings to lower."""

import contextlib
import re
from collections.abc import Iterator

import jax

from jpaged.config import EngineConfig
from jpaged.errors import CapacityError, ConfigError

ASKED = re.compile(r"allocat\w* ([\d.]+ ?(?:bytes|[KMGT]i?B?))")  # in the messages of every backend


@contextlib.contextmanager
def explained(config: EngineConfig, *, pool_bytes: int | None = None) -> Iterator[None]:
    """Running out of memory inside becomes an error that names the settings to lower; anything else passes.

    pool_bytes: of the pool that is allocated inside (a ConfigError then); None for a step (a CapacityError).
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as e:
        if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        if pool_bytes is not None:
            lower = _values(config, "num_blocks", "memory_utilization")
            raise ConfigError(f"the KV pool of {pool_bytes} bytes does not fit the device: lower {lower}") from e
        asked = ASKED.search(str(e))
        lower = _values(config, "num_blocks", "memory_utilization", "max_num_batched_tokens", "max_num_seqs")
        raise CapacityError(f"a step could not get {asked[1] if asked else 'memory'}: lower {lower}") from e


def _values(config: EngineConfig, *names: str) -> str:
    *first, last = (f"{name}={getattr(config, name)}" for name in names)
    return f"{', '.join(first)} or {last}"
