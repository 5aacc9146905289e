"""The sessions that generate and score keep between calls, each for params of one form."""

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jpaged.checkpoint.load import load_params
from jpaged.config import EngineConfig, reads_mtp_head
from jpaged.fair_lock import FairLock
from jpaged.models.config import ModelConfig
from jpaged.models.params import Params
from jpaged.runtime.mesh import serving_mesh
from jpaged.runtime.weights import as_params
from jpaged.session import Session
from jpaged.types import ModelLike, PyTree, Tokenizer

MAX_SESSIONS = 2


class Call(NamedTuple):
    """What a call passed, known by identity, and the key of the session that served it.

    params: held weakly, so that nobody's weights are kept alive. others: the other arguments that
    choose a session.
    """

    params: weakref.ref[Params]
    others: tuple[object, ...]
    key: Any


_kept: OrderedDict[Any, Session] = OrderedDict()  # least recently used first; none that is in use
_latest: Call | None = None  # None where the latest call passed what may change
_turns = FairLock()  # of a whole call: its weights are bound, and only one call's can be


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

    A call that passes the very objects of the latest one has its session, once it is seen that
    the params have the same arrays still.

    Other threads wait. A call that this thread makes inside the block (a tokenizer's, say) finds
    another session: one that is in use is not among the kept ones. any_tokenizer: one with another
    tokenizer than this will do.
    """
    others = (config, mesh, engine_config, tokenizer, any_tokenizer, draft)
    with _turns.held():
        last, key, session = _latest, None, None
        if last is not None and last.params() is params and all(map(is_, last.others, others)):
            key, session = last.key, _kept.get(last.key)
        if session is not None and session.served.bind_again(params):
            del _kept[key]
            weights = guesses = None
        else:
            engine_config = EngineConfig() if engine_config is None else engine_config
            if isinstance(params, str | Path):
                mesh = serving_mesh(engine_config, mesh)
                params = load_params(params, mesh=mesh)
            weights = as_params(params, config)
            guesses = None if draft is None else as_params(draft)
            key = _key(weights, guesses, engine_config, mesh, tokenizer)
            if any_tokenizer and key not in _kept:
                key = next((other for other in reversed(_kept) if other[:-1] == key[:-1]), key)
            session = _kept.pop(key, None)
            _trim(MAX_SESSIONS - 1)
            _remember(params, others, key)
            if session is None:
                session = Session(
                    weights, engine_config, mesh, tokenizer, grows=True, draft=guesses, turns=_turns
                )
        try:
            if weights is not None:
                session.served.bind(weights, draft=guesses)
            yield session
        finally:
            session.served.unbind()
            # An interrupt of the call's own clearing up may have left requests: the next call's
            # session must have none.
            if session.pool.is_idle:
                _kept[key] = session
                _kept.move_to_end(key)
                if len(_kept) > MAX_SESSIONS:
                    _trim(MAX_SESSIONS)


def _key(
    weights: Params,
    guesses: Params | None,
    engine_config: EngineConfig,
    mesh: Mesh | None,
    tokenizer: Tokenizer | None,
) -> tuple[Any, ...]:
    """Return what calls that share a session have in common, the tokenizer last."""
    form = tuple(
        [
            (x.shape, str(x.dtype), getattr(x, "sharding", None))
            for x in jax.tree.leaves((weights, guesses))
        ]
    )
    model: Any = weights.config
    drafts: Any = None if guesses is None else guesses.config
    if guesses is None and reads_mtp_head(engine_config):
        drafts = weights.source
    tokens = weights.source if tokenizer is None else id(tokenizer)
    return model, model.eos_token_ids, engine_config, mesh, form, drafts, tokens


def _remember(params: PyTree, others: tuple[object, ...], key: Any) -> None:
    """Know this call again, if none of its arguments but the arrays of its params can change."""
    global _latest
    config, *_, draft = others
    is_fixed = draft is None and (config is None or isinstance(config, ModelConfig))
    is_known = is_fixed and type(params) is Params
    _latest = Call(weakref.ref(params), others, key) if is_known else None


def release(compiled: bool) -> None:
    """Free the pools and derived weights of all that are kept; executables too if `compiled`."""
    global _latest
    with _turns.held():
        for kept in _kept.values():
            kept.served.release()
        if compiled:
            _kept.clear()
            _latest = None


def sessions() -> list[Session]:
    """Return what is kept now, the session of the latest call last."""
    with _turns.held():
        return list(_kept.values())


def _trim(count: int) -> None:
    """Let go of the least recently used sessions, all but so many."""
    while len(_kept) > count:
        _kept.popitem(last=False)
