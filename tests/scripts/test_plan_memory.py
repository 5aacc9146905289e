"""scripts/plan_memory.py: the account of the machine at hand and of cards that are not here."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import _common as common
import jax
import memory_table
import pytest

from jpaged import gpu_share
from jpaged.cli import absent
from jpaged.cli import plan as plan_memory
from jpaged.config import EngineConfig
from jpaged.models.params import param_shapes
from jpaged.runtime import memory
from tests.tiny import CONFIG, config

ROOT = Path(__file__).parents[2]
SMALL = ["--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--block-size", "16"]


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in common.LIBTPU.items():
        monkeypatch.setenv(name, value)


def read(out: str) -> tuple[str, dict[str, int], list[str]]:
    """The first line, the bytes by name, and the lines after the account."""
    first, *lines = out.splitlines()
    account = {
        k: int(n.replace(",", ""))
        for k, n in re.findall(r"^(\w+) +([-\d,]+) bytes", "\n".join(lines), re.M)
    }
    return first, account, lines[len(account) :]


def test_the_machine_at_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(config(max_position_embeddings=128).to_hf() | {"dtype": "float16"})
    )
    assert plan_memory.main([str(tmp_path), *SMALL, "--length", "100", "16"]) == 0
    first, account, (blocks, long, short, waste) = read(capsys.readouterr().out)
    assert "in float16 on the device at hand; steps: an upper bound" in first
    assert list(account) == [
        "weights",
        "other",
        "temporaries",
        "code",
        "state",
        "pool",
        "unused",
        "limit",
    ]
    assert (
        account.pop("limit") == sum(account.values()) > 0
        and account["other"] == account["code"] == 0
    )
    block_bytes = 2 * 16 * 4 * 16 * 2  # layers, tokens, K and V of two heads, dimensions, bytes
    assert account["pool"] == 8 * 8 * block_bytes, "every row at 128 tokens"
    assert blocks.startswith(
        f"64 blocks of {block_bytes:,} bytes, 16 tokens each: 1,024 tokens (decided by max_num_seqs"
    )
    assert long.startswith("requests of 100 tokens: 9 in the pool, 8 run at once")
    assert short.startswith("requests of 16 tokens: 64 in the pool")
    assert waste == f"waste: {account['unused']:,} bytes of the limit that nothing uses"


def test_the_account_as_a_table() -> None:
    limits, pool = memory.Limits(total=64 << 20), memory.PoolCost((memory.GroupCost(1 << 20),))
    sizes = EngineConfig(block_size=16, max_num_seqs=4).resolve(CONFIG)
    found = memory.plan(sizes, limits, pool=pool, weights=16 << 20, needs=memory.Needs())
    *rows, last = plan_memory.table(found).splitlines()
    assert [row.split()[0] for row in rows] == [
        "weights",
        "other",
        "temporaries",
        "code",
        "state",
        "pool",
        "unused",
        "limit",
    ]
    assert rows[0].split()[1:] == ["16,777,216", "bytes", "0.016", "GiB", "25.0%"] and rows[
        -1
    ].endswith("100.0%")
    assert last == (
        "16 blocks of 1,048,576 bytes, 16 tokens each: 256 tokens (decided by "
        "max_num_seqs * max_model_len)"
    )


def test_the_blocks_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """One line a group of layers: one with a window has no more blocks than its rows see."""
    model = config(sliding_windows=(None, 7))
    sizes = EngineConfig(block_size=16, max_num_seqs=4).resolve(model)
    pool = memory.PoolCost((memory.GroupCost(2048), memory.GroupCost(1024, 9)))
    limits = memory.Limits(total=64 << 20)
    found = memory.plan(sizes, limits, pool=pool, needs=memory.Needs())
    plan_memory.print_groups(found, model)
    assert capsys.readouterr().out.splitlines() == [
        f"1 layers of 2 x 16 with no window: {found.num_blocks} blocks of 2,048 bytes",
        "1 layers of 2 x 16 with a window of 7: 9 blocks of 1,024 bytes",
    ]
    plan_memory.print_groups(found, CONFIG)
    assert capsys.readouterr().out == "", "the account has said it"


def test_a_card_that_nothing_here_compiles_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(absent, "cannot_compile", lambda platform: "no plugin")
    flags = [
        "--card",
        "h100",
        "--memory-utilization",
        "0.5",
        "--max-num-seqs",
        "4096",
        "--length",
        "40960",
    ]
    assert plan_memory.main(["--random", "0.6b", *flags]) == 0
    first, account, (_, requests, waste) = read(capsys.readouterr().out)
    assert (
        "0.6b in bfloat16 on h100; steps: an upper bound, proved for CPUs only (no plugin)" in first
    )
    assert (
        account["limit"] == int(int((81559 << 20) * 0.75) * 0.5)
        and account["weights"] == 1192099840
    )
    block_bytes = 28 * 64 * 16 * 128 * 2
    assert account["pool"] % block_bytes == 0 and 0 <= account["unused"] < block_bytes, (
        "memory decides"
    )
    assert requests.startswith(
        f"requests of 40,960 tokens: {account['pool'] // block_bytes // 640} in the pool"
    )
    assert waste.startswith(f"waste: {account['unused']:,} ")
    assert plan_memory.main(["--random", "0.6b", *flags, "--token-buckets", "8192"]) == 0
    assert read(capsys.readouterr().out)[1] == account, "steps of the card, not of a CPU"


def test_eight_cards_that_share_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name; what does not fit one card fits each of eight, and says so where it does not."""
    monkeypatch.setattr(absent, "cannot_compile", lambda platform: "no plugin")
    sizes = ["--max-model-len", "8192", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]
    eight = ["--random", "Qwen3-32B", *sizes, "--tensor-parallel-size", "8"]
    assert plan_memory.main([*eight, "--card", "h100"]) == 0
    first, account, (blocks, *_) = read(capsys.readouterr().out)
    assert first.startswith("Qwen3-32B in bfloat16 on each of 8 of h100")
    norms = 64 * (2 * 5120 + 2 * 128) + 5120
    split = 64 * (10 * 8 * 128 * 5120 + 8192 * 5120 + 3 * 5120 * 25600) + 2 * 152576 * 5120
    assert account["weights"] == 2 * (norms + split // 8)
    assert account["other"] == 2 * 2 * 151936 * 5120 // 8, "embedding and head without padding"
    assert f"of {2 * 64 * 64 * 128 * 2:,} bytes" in blocks, "one KV head of eight"
    assert plan_memory.main(["--random", "Qwen3-32B", *sizes, "--card", "h100"]) == 1
    err = capsys.readouterr().err
    assert "no KV block" in err and "raise memory_utilization=0.9, tensor_parallel_size=None" in err
    cards = plan_memory.CARDS
    assert (cards["v5e"].slice(8), cards["h100"].slice(8)) == ("v5e:2x4", "sm_90a")
    assert plan_memory.main(["--random", "tiny", "--card", "v5e", "--tensor-parallel-size", "12"])


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen2.5-3B", 3.09), ("Qwen3-32B", 32.76), ("Llama-3.3-70B", 70.55)]
)
def test_models_by_name_have_their_size(name: str, billions: float) -> None:
    shapes = param_shapes(common.LARGE[name])
    sizes = jax.tree.leaves(shapes, is_leaf=lambda node: isinstance(node, tuple))
    assert sum(map(math.prod, sizes)) == pytest.approx(billions * 1e9, rel=2e-3)


def test_what_jax_takes_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = plan_memory.CARDS
    monkeypatch.setenv(gpu_share.VARIABLE, "0.5")
    assert cards["a100"].limit == 81920 << 19 and cards["v5e"].limit == int(15.75 * 2**30)


def test_what_does_not_fit_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        plan_memory.main(["--random", "0.6b", "--card", "v5e", "--bound", "--max-num-seqs", "9999"])
        == 1
    )
    err = capsys.readouterr().err
    assert (
        err.startswith("jpaged plan: no KV block of ")
        and "max_num_seqs=9999" in err
        and err.count("\n") == 1
    )
    assert plan_memory.main([str(tmp_path)]) == 1, "no config.json"
    for bad in ([], ["--random", "tiny", "--length", "0"]):
        with pytest.raises(SystemExit):
            plan_memory.main(bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "kind", "reason"),
    [
        ("h200", "NVIDIA H200", common.cannot_compile("cuda")),
        ("v5e", "TPU v5 lite", common.cannot_compile("tpu")),
    ],
)
def test_steps_compiled_for_a_card_that_is_not_here(
    card: str, kind: str, reason: str | None
) -> None:
    if reason is not None:
        pytest.skip(reason)
    flags = ["--card", card, *SMALL, "--length", "100", "--max-model-len", "256"]
    command = [sys.executable, "scripts/plan_memory.py", "--random", "tiny", *flags]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, account, _ = read(done.stdout)
    assert f"steps: compiled for {kind}" in first and account["temporaries"] > 0
    assert (account["code"] > 0) == (card == "v5e"), (
        "code lies in a TPU's memory, and not in the share of a GPU's"
    )


def test_a_line_a_model_and_a_card() -> None:
    """A model whose layers differ has the fewest cards that hold it, rows as far as there are
    states, and blocks by group.
    """
    models = ("Qwen3.6-35B-A3B", "Gemma-4-31B", "GLM-4.7-Flash")
    args = memory_table.parse_args(["--cards", "h200", "--models", *models])
    _, hybrid, gemma, latents = (
        [cell.strip() for cell in line.split("  ") if cell] for line in memory_table.table(args)
    )
    assert (hybrid[:2], gemma[:2]) == (["Qwen3.6-35B-A3B", "1 x h200"], ["Gemma-4-31B", "1 x h200"])
    # 30 layers of 32 matrices of 128 x 128 in f32, and 3 inputs of 8,192 channels in bf16.
    of_state = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert hybrid[5] == f"{of_state / 2**20:.1f}" and 64 < int(hybrid[7]) < 256 == int(gemma[7])
    windows, full = (int(count.replace(",", "")) for count in gemma[6].split("/"))
    short, long = map(int, gemma[8].split(" / "))
    assert windows < full / 4 and short > 3 * long >= 12
    # It keeps no state, and of a token one latent of 576 numbers a layer: many rows fit.
    assert latents[5] == "-" and int(latents[7]) == 256 and int(latents[8].split(" / ")[0]) > 100
