"""One replica of a fleet, with a real engine."""

import asyncio
from pathlib import Path

import pytest

from jpaged import LLM
from jpaged.fleet.replica import FleetReplica, Served
from tests.text_model import write_folder
from tests.tiny import ENGINE


def test_new_weights_are_counted_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What AsyncLLM.stats tells may be of before."""
    first, second = (write_folder(tmp_path / name, name) for name in ("first", "second"))
    size = (second / "model.safetensors").stat().st_size

    async def run() -> None:
        sizes = {name: getattr(ENGINE, name) for name in ("block_size", "num_blocks")}
        replica = FleetReplica("a", LLM(first, dtype="float32", max_num_seqs=4, **sizes))
        before = replica.llm.stats()
        monkeypatch.setattr(replica.llm, "stats", lambda: before)
        try:
            for serial, folder in enumerate((second, first, second), 1):
                served = Served(serial=serial, weights=str(folder), version=1 + serial)
                changed = await replica.serve(served)
                assert 0.5 * size < changed.num_bytes <= size and changed.seconds > 0
                assert (await replica.serve(served)).num_bytes == 0
        finally:
            await replica.close()

    asyncio.run(run())
