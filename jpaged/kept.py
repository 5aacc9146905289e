"""The sessions that generate and score keep between calls, each for params of one form."""

import contextlib
import dataclasses
import os
import threading
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
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.params import Params
from jpaged.runtime.mesh import serving_mesh
from jpaged.runtime.weights import as_params
from jpaged.session import Session
from jpaged.turns import Turns
from jpaged.types import ModelLike, PyTree, Tokenizer

MAX_SESSIONS = 2


class Call(NamedTuple):
    """What a call passed, known by identity, and the key of the session that served it.

    params: held weakly, so that nobody's weights are kept alive.
    """

    params: weakref.ref[Params]
    others: "Others"
    key: Any


class Others(NamedTuple):
    """The other arguments of a call that choose a session."""

    config: ModelLike | None
    mesh: Mesh | None
    engine_config: EngineConfig | None
    tokenizer: Tokenizer | None
    any_tokenizer: bool
    draft: PyTree


_kept: OrderedDict[Any, Session] = OrderedDict()  # least recently used first; none that is in use
_latest: Call | None = None  # None where the latest call passed what may change


@dataclasses.dataclass(eq=False)
class Lease:
    """A session that is in use. group: what its calls have in common; None for a call that shares
    it with no other. key: by which it is kept. users: a lock for each call, free once the call has
    ended, however it did.
    """

    session: Session
    key: Any
    group: object
    users: list[threading.Lock]


# Of whole calls: weights are bound to a session, so calls hold it together only by the same.
_turns = Turns()
_leases: list[Lease] = []  # one a group, but for calls within calls
_changing = threading.RLock()  # held while `_kept` and `_leases` change


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

    Threads that pass the same arrays, and otherwise equal arguments, have the session together;
    others wait. A call that this thread makes inside the block (a tokenizer's, say) finds another
    session: one that is in use is not among the kept ones. any_tokenizer: one with another
    tokenizer than this will do. Raises ConfigError.
    """
    if engine_config is not None and not isinstance(engine_config, EngineConfig):
        kind = type(engine_config).__name__
        raise ConfigError(f"engine_config of type {kind}: pass EngineConfig(...) of its fields")
    others = Others(config, mesh, engine_config, tokenizer, any_tokenizer, draft)
    group, user = None, threading.Lock()
    if not isinstance(params, str | Path):
        # Two trees have it in common only if they are one, or of the same arrays.
        trees = [
            id(x) if x is None or type(x) is Params else [*map(id, jax.tree.leaves(x))]
            for x in (params, draft)
        ]
        group = (trees, config, mesh, engine_config, id(tokenizer))
    with user, contextlib.ExitStack() as turn:
        if not turn.enter_context(_turns.held(group)):
            group = None  # a call within a call
        lease = _lease(params, others, group, user)
        if lease is None:
            # The arrays in a tree were replaced while a call with this tree runs: wait for it.
            turn.close()
            turn.enter_context(_turns.held())
            lease = _lease(params, others, None, user)
            assert lease is not None, "a call that is alone joins none"
        try:
            yield lease.session
        finally:
            with _changing:
                lease.users.remove(user)
                if not lease.users:
                    _end(lease)


def _lease(params: PyTree, others: Others, group: object, user: threading.Lock) -> Lease | None:
    """Return the lease of this group, with one user more, or a new one of a session to which these
    weights are bound; None where the group's has other arrays than these trees. What interrupted
    calls have left is ended.
    """
    with _changing:
        for lease in list(_leases):
            if not [other for other in lease.users if other.locked()]:
                _end(lease)
            elif group is not None and lease.group == group:
                served, draft = lease.session.served, others.draft
                # Arrays of Params can be replaced; those of other trees are in the group.
                kinds = [(params, served.weights)]
                kinds += [] if served.draft is None else [(draft, served.draft.weights)]
                if [x for x, w in kinds if type(x) is Params and w.again(x) is None]:
                    return None
                lease.users.append(user)
                return lease
        config, mesh, engine_config, tokenizer, any_tokenizer, draft = others
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
                params = load_params(params, mesh=mesh, images=engine_config.images)
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
        lease = Lease(session, key, group, [user])
        try:
            _leases.append(lease)
            if weights is not None:
                session.served.bind(weights, draft=guesses)
        except BaseException:
            _end(lease)
            raise
        return lease


def _end(lease: Lease) -> None:
    """Keep a session that nobody uses."""
    _leases.remove(lease)
    lease.session.served.unbind()
    # An interrupt of the call's own clearing up may have left requests: the next call's session
    # must have none.
    if lease.session.pool.is_idle:
        _kept[lease.key] = lease.session
        _kept.move_to_end(lease.key)
        if len(_kept) > MAX_SESSIONS:
            _trim(MAX_SESSIONS)


def _forget_all() -> None:
    """Have no session in a fork of the process: its threads are not there."""
    global _turns, _changing
    _turns, _changing = Turns(), threading.RLock()
    _kept.clear()
    _leases.clear()


os.register_at_fork(after_in_child=_forget_all)


def _key(
    weights: Params,
    guesses: Params | None,
    engine_config: EngineConfig,
    mesh: Mesh | None,
    tokenizer: Tokenizer | None,
) -> tuple[object, ...]:
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


def _remember(params: PyTree, others: Others, key: object) -> None:
    """Know this call again, if none of its arguments but the arrays of its params can change."""
    global _latest
    config = others.config
    is_fixed = others.draft is None and (config is None or isinstance(config, ModelConfig))
    is_known = is_fixed and type(params) is Params
    _latest = Call(weakref.ref(params), others, key) if is_known else None


def release(compiled: bool) -> None:
    """Free the pools and derived weights of all that are kept; executables too if `compiled`."""
    global _latest
    with _turns.held(), _changing:
        for kept in _kept.values():
            kept.served.release()
        if compiled:
            _kept.clear()
            _latest = None


def sessions() -> list[Session]:
    """Return what is kept now, the session of the latest call last."""
    with _turns.held(), _changing:
        return list(_kept.values())


def _trim(count: int) -> None:
    """Let go of the least recently used sessions, all but so many."""
    while len(_kept) > count:
        _kept.popitem(last=False)
