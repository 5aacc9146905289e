"""What jpaged.generate keeps from one call to the next, and Params that went through jax in
between.
"""

import dataclasses
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import jpaged
import jpaged.kept as kept_module
from jpaged import ConfigError, Params, SamplingParams
from jpaged.engine.engine import Engine
from jpaged.kept import sessions as kept_sessions
from jpaged.runtime.runner import Runner
from jpaged.session import Session
from tests.text_model import write_folder
from tests.tiny import (
    ENGINE,
    STEPS,
    compiles,
    config,
    dense_greedy,
    engine,
    engine_of,
    make_params,
    make_prompts,
    tokens_of,
)

ONE_LAYER = config(
    num_layers=1
)  # half the time to compile, for tests that need engines of their own
GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPTS = make_prompts(1, 4, 17, 40, 16)


@pytest.fixture(scope="module")
def params() -> Iterator[Params]:
    jpaged.release(compiled=True)
    yield make_params(0, ONE_LAYER)
    jpaged.release(compiled=True)


def generate(
    params: Any, prompts: Any, sampling: Any = GREEDY, **options: Any
) -> list[jpaged.RequestOutput]:
    options.setdefault("engine_config", ENGINE)
    return jpaged.generate(params, prompts, sampling, **options)


def kept() -> tuple[Session, Engine, Runner]:
    """The session that the last call used."""
    session = kept_sessions()[-1]
    return session, engine_of(session), session.runner


@pytest.mark.train
def test_scenario_25_params_are_a_pytree(tmp_path: Path) -> None:
    a, b = (
        jpaged.load_params(write_folder(tmp_path / name, name, ONE_LAYER)) for name in ("a", "b")
    )
    assert a.source == tmp_path / "a" and a.config == ONE_LAYER

    optimizer = optax.adam(1e-2)
    state = optimizer.init(a)  # pyright: ignore[reportArgumentType]
    updates, state = optimizer.update(jax.tree.map(jnp.ones_like, a), state, a)  # pyright: ignore[reportArgumentType]
    trained = optax.apply_updates(a, updates)  # pyright: ignore[reportArgumentType]
    mean = jax.tree.map(lambda x, y: (x + y) / 2, a, b)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", mean)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda p: p, mean))
    jpaged.save_params(mean, tmp_path / "orbax")
    loaded = jpaged.load_params(tmp_path / "orbax")

    assert all(isinstance(p, Params) for p in (trained, mean, restored))
    streams = [tokens_of(generate(p, PROMPTS)) for p in (a, b, trained, mean)]
    assert len({str(s) for s in streams}) == 4
    assert all(
        (x == y).all() for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(mean), strict=True)
    )
    for p in (restored, jax.device_get(mean)):
        assert tokens_of(generate(p, PROMPTS)) == streams[3]


@pytest.mark.own_steps
def test_release(params: Params) -> None:
    expected = tokens_of(generate(params, PROMPTS[:2]))
    _, running, runner = kept()
    assert runner.pool_bytes
    jpaged.release()
    assert runner.pool_bytes == 0 and running.replicas[0].blocks.num_used == 0
    with compiles() as names:
        outputs = generate(params, PROMPTS[:2])
    assert kept()[2] is runner and not {*STEPS} & {*names}, "executables stay"
    assert tokens_of(outputs) == expected and [output.num_cached_tokens for output in outputs] == [
        0,
        0,
    ]
    jpaged.release(compiled=True)
    assert not kept_sessions()


@pytest.mark.own_steps
def test_the_pool_grows_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    params = make_params(0, ONE_LAYER)
    settings = engine(num_blocks=None, block_size=8)
    with caplog.at_level(logging.INFO, "jpaged"):
        generate(params, PROMPTS[:1], engine_config=settings)
        assert kept()[1].replicas[0].blocks.num_blocks == 8, "a power of two, 8 at least"
        assert (
            "compiled PrefillShape(tokens=16, rows=8" in caplog.text and "grows" not in caplog.text
        )
        with compiles() as names:
            generate(params, PROMPTS[1:2], engine_config=settings)
        assert names == [], "what fits compiles nothing"
        long = SamplingParams(temperature=0, max_tokens=20)
        outputs = generate(params, PROMPTS, long, engine_config=settings)
    assert "the KV pool grows from 8 blocks to 32 blocks: steps compile again" in caplog.text
    assert kept()[1].replicas[0].blocks.num_blocks == 32
    assert tokens_of(outputs) == [dense_greedy(params, prompt, 20) for prompt in PROMPTS]
    generate(params, PROMPTS[:1], engine_config=settings)
    assert kept()[1].replicas[0].blocks.num_blocks == 32, "and never shrinks"


def test_two_engines_are_kept(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    setup = Session.__init__
    monkeypatch.setattr(
        Session,
        "__init__",
        lambda self, *args, **options: (made.append(args), setup(self, *args, **options))[1],
    )
    monkeypatch.setattr(Session, "generate", lambda self, *args, **options: [])
    jpaged.release(compiled=True)
    a, b, c = engine(block_size=2), engine(block_size=3), engine(block_size=5)
    for settings, count in ((a, 1), (b, 2), (a, 2), (c, 3), (a, 3), (b, 4), (c, 5)):
        generate(params, PROMPTS, engine_config=settings)
        assert len(made) == count and len(kept_sessions()) <= 2
    generate(make_params(1, ONE_LAYER), PROMPTS, engine_config=c)
    assert len(made) == 5, "other weights of the same form: the same engine"
    generate(make_params(0, ONE_LAYER, jnp.bfloat16), PROMPTS, engine_config=c)
    assert len(made) == 6, "another dtype: another engine"
    jpaged.release(compiled=True)


def test_a_repeated_call_is_known_and_other_arrays_in_its_params_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound, checked = list[tuple[Session, int]](), list[int]()
    as_params = kept_module.as_params
    monkeypatch.setattr(
        kept_module, "as_params", lambda *a: (checked.append(len(a)), as_params(*a))[1]
    )
    monkeypatch.setattr(
        Session,
        "generate",
        lambda self, *args, **options: bound.append((self, self.served.weights.version)) or [],
    )
    jpaged.release(compiled=True)
    params = make_params(0, ONE_LAYER)
    for _ in range(3):
        generate(params, PROMPTS)
    assert len(checked) == 1 and bound[1:] == bound[:1] * 2, "the second and third call are known"
    params["norm"]["scale"] = params["norm"]["scale"] + 1
    generate(params, PROMPTS)
    session, version = bound[0]
    assert bound[-1] == (session, version + 1), "another array in the same tree is another version"
    generate(params, PROMPTS, config=ONE_LAYER)
    generate(params, PROMPTS, engine_config=dataclasses.replace(ENGINE))
    assert len(checked) == 4 and bound[-1] == bound[-2] == (session, version + 1), "by value"
    generate(params, PROMPTS, engine_config=engine(block_size=3))
    assert bound[-1][0] is not session
    generate(params, PROMPTS)
    array = weakref.ref(params["norm"]["scale"])
    params["norm"]["scale"].delete()
    with pytest.raises(ConfigError, match="deleted"):
        generate(params, PROMPTS)
    del params
    assert array() is None, "what is kept between calls keeps no weights alive"
    jpaged.release(compiled=True)
