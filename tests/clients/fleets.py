"""What the tests of a fleet on Ray share: its settings, the requests, and how a replica is killed.
Nothing here imports Ray before it is called, so that a machine without it can skip.
"""

import importlib
import random
import time
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM, SamplingParams
from tests.openai.live import PATIENCE_S, Live
from tests.tiny import ENGINE

FLEET_MARKS = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in (
        "DeprecationWarning",
        "FutureWarning",
        "ResourceWarning",
        "UserWarning",
        "pytest.PytestUnraisableExceptionWarning",
        "pytest.PytestUnhandledThreadExceptionWarning",
    )
]
SIZES = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "token_buckets", "seq_buckets"),
    *("num_blocks", "max_logprobs", "max_logit_bias", "max_stop_ids"),
)
SETTINGS: dict[str, Any] = {name: getattr(ENGINE, name) for name in SIZES} | {"dtype": "float32"}
GENERATE = "/inference/v1/generate"
LENGTH = 24


def body(i: int, seed: int) -> dict[str, Any]:
    asked = {"max_tokens": LENGTH, "temperature": 0.8, "ignore_eos": True, "seed": seed}
    return {"token_ids": prompt(i), "sampling_params": asked, "user": f"user {i % 3}"}


def prompt(i: int) -> list[int]:
    return [*range(10 + i % 3, 30 + i % 3), 40 + i]


def tokens_of(folder: Path, count: int) -> list[list[int]]:
    """What one engine draws for each of so many requests."""
    llm = LLM(folder, **SETTINGS)
    asked = [
        SamplingParams(max_tokens=LENGTH, temperature=0.8, ignore_eos=True, seed=i)
        for i in range(count)
    ]
    outs = llm.generate([prompt(i) for i in range(count)], asked, use_tqdm=False)
    llm.close()
    return [out.outputs[0].token_ids for out in outs]


def answer(live: Live, i: int) -> list[int]:
    """The tokens of one request; of every other one as a stream."""
    if i % 2:
        whole = live.post(GENERATE, body(i, i))
        return whole["choices"][0]["token_ids"]
    events = live.events(GENERATE, body(i, i))
    return [t for e in events for c in e["choices"] for t in c["token_ids"]]


def kill_one(rng: random.Random) -> str:
    """Kill a replica as kill -9 does; return the name that the router knows it by."""
    ray: Any = importlib.import_module("ray")

    from jpaged.fleet.on_ray import NAME

    named = ray.util.list_named_actors(all_namespaces=True)
    names = [a["name"] for a in named if a["name"].startswith(f"SERVE_REPLICA::{NAME}#")]
    name = rng.choice(sorted(names))
    ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)
    return name.rpartition("#")[2]


def wait_without(live: Live, dead: str) -> float:
    """The seconds until two replicas are sent to, of which none is this one."""
    began = time.monotonic()
    llm: Any = live.server.llm
    while len(set(llm.router.replicas) - {dead}) < 2:
        assert time.monotonic() - began < 4 * PATIENCE_S
        time.sleep(0.05)
    return time.monotonic() - began


def metric(live: Live, name: str) -> float:
    _, text, _ = live.request("/metrics")
    lines = [line for line in text.splitlines() if line.partition(" ")[0] == name]
    assert len(lines) == 1, (name, lines)
    return float(lines[0].rpartition(" ")[2])
