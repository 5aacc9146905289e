"""The sessions that generate and score keep between calls, each for params of one form."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jpaged.checkpoint.load import load_params
from jpaged.config import EngineConfig
from jpaged.runtime.mesh import serving_mesh
from jpaged.runtime.weights import as_params
from jpaged.session import Session
from jpaged.turns import Turns
from jpaged.types import ModelLike, PyTree, Tokenizer

MAX_SESSIONS = 2
_kept: OrderedDict[Any, Session] = OrderedDict()  # least recently used first; none that is in use
_turns = Turns()  # of a whole call: its weights are bound, and only one call's can be


@contextlib.contextmanager
def session(
    params: PyTree,
    config: ModelLike | None,
    mesh: Mesh | None,
    engine_config: EngineConfig | None,
    tokenizer: Tokenizer | None = None,
    *,
    draft: PyTree = None,
    any_tokenizer: bool = False,
) -> Iterator[Session]:
    """Lend the session kept for params of this form, or a new one in place of the least recently
    used; these params, and those of a draft model, are bound to it inside the block.

    Other threads wait. A call that this thread makes inside the block (a tokenizer's, say) finds
    another session: one that is in use is not among the kept ones. any_tokenizer: one with another
    tokenizer than this will do.
    """
    with _turns.held():
        engine_config = EngineConfig() if engine_config is None else engine_config
        if isinstance(params, str | Path):
            mesh = serving_mesh(engine_config, mesh)
            params = load_params(params, mesh=mesh)
        weights = as_params(params, config)
        guesses = None if draft is None else as_params(draft)
        form = tuple(
            [
                (x.shape, str(x.dtype), getattr(x, "sharding", None))
                for x in jax.tree.leaves((weights, guesses))
            ]
        )
        model, drafts = weights.config, None if guesses is None else guesses.config
        tokens = weights.source if tokenizer is None else id(tokenizer)
        key = (model, model.eos_token_ids, engine_config, mesh, form, drafts, tokens)
        if any_tokenizer and key not in _kept:
            key = next((other for other in reversed(_kept) if other[:-1] == key[:-1]), key)
        session = _kept.pop(key, None)
        _trim(MAX_SESSIONS - 1)
        if session is None:
            session = Session(
                weights, engine_config, mesh, tokenizer, grows=True, draft=guesses, turns=_turns
            )
        try:
            session.served.bind(weights, draft=guesses)
            yield session
        finally:
            session.served.unbind()
            # An interrupt of the call's own clearing up may have left requests: the next call's
            # session must have none.
            if not (session.pool.has_engine and session.pool.engine.has_unfinished()):
                _kept[key] = session
                _kept.move_to_end(key)
                _trim(MAX_SESSIONS)


def release(compiled: bool) -> None:
    """Free the pools and derived weights of all that are kept; executables too if `compiled`."""
    with _turns.held():
        for kept in _kept.values():
            kept.served.release()
        if compiled:
            _kept.clear()


def sessions() -> list[Session]:
    """Return what is kept now, the session of the latest call last."""
    with _turns.held():
        return list(_kept.values())


def _trim(count: int) -> None:
    """Let go of the least recently used sessions, all but so many."""
    while len(_kept) > count:
        _kept.popitem(last=False)
