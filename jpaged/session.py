"""Session: the weights, KV pool and engine of one model, which a face (LLM, generate) holds."""

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from jpaged.adapters import Adapters, check_fits, check_name, grown
from jpaged.config import EngineConfig
from jpaged.drafts import draft_model, no_head
from jpaged.engine.engine import Engine
from jpaged.engine.sequence import Request
from jpaged.errors import ConfigError, RequestError
from jpaged.models.params import DONATED, Params
from jpaged.models.quantized import experts_are_plain
from jpaged.request.outputs import RequestOutput
from jpaged.request.prompts import Adapted, match_adapters
from jpaged.runtime.compiled_steps import use_compilation_cache
from jpaged.runtime.footprint import plan_pool
from jpaged.runtime.memory import Needs
from jpaged.runtime.processes import are_many, least
from jpaged.runtime.resolve import resolve
from jpaged.runtime.runner import Runner
from jpaged.runtime.shared_runner import SharedRunner
from jpaged.runtime.step_table import warmup
from jpaged.runtime.weights import ServingWeights, as_params, is_deleted, placement

log = logging.getLogger("jpaged")

# The host plans and packs the next dispatch while the device works on the last one.
DISPATCHES_IN_FLIGHT = 2
LEAST_BLOCKS = 8  # of a pool that grows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The requests of an LLM at one moment, for `restore`. Opaque.

    owner: the identity of the engine, whose snapshot `engine` is. ready, num_calls: what a face
    adds.
    """

    owner: object
    weight_version: int
    engine: Any
    ready: tuple[RequestOutput, ...]
    num_calls: int


class Session:
    """One model, which runs requests once `bind` has given it weights and `start` a pool.

    params: tell form and place of the weights; their arrays are left alone. config: as the caller
    wrote it; engine_config is the resolved one, whose num_blocks stays None where the pool is sized
    when it is made. grows: `reserve` starts and enlarges the pool. draft: weights that guess for
    them. Raises ConfigError.
    """

    def __init__(
        self,
        params: Params,
        config: EngineConfig,
        mesh: Mesh | None,
        *,
        grows: bool,
        draft: Params | None = None,
    ):
        self.model_config = no_head(params.config)
        use_compilation_cache(config.compilation_cache_dir)
        self.placement = placement(params, config, mesh)
        dtype, is_plain = config.dtype or params["embed"]["weight"].dtype, experts_are_plain(params)
        self.engine_config, self.choices = resolve(
            params.config, config, self.placement, dtype, is_plain
        )
        how = self.engine_config, self.placement, dtype
        self.draft = draft_model(draft, params.config, *how)
        if self.draft is not None:
            guesses = self.draft.choices(self.engine_config, self.placement)
            self.choices = dataclasses.replace(self.choices, draft=guesses)
        self.weights = ServingWeights(self.placement, config.dtype, config.quantization)
        self.adapters = Adapters(params.config, self.placement.axis_size, dtype)
        self.adapters.grows = grows and not config.max_loras
        self.params: Params | None = None  # those bound now
        self._grows, self._is_asleep = grows, False
        self._cached_version = 0  # weight version that the prefix cache is of
        self._engine: Engine | None = None
        self.needs: Needs | None = None  # of compiled steps, once they were asked

    @property
    def has_pool(self) -> bool:
        """Whether there is an engine: from `start` until `close`."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """What runs the requests; ConfigError where there is none."""
        if self._engine is None:
            raise ConfigError("this LLM is closed")
        return self._engine

    @property
    def runner(self) -> Runner:
        """What holds the pool; ConfigError where there is none."""
        runner = self.engine.runner
        assert isinstance(runner, Runner)
        return runner

    def check_awake(self) -> None:
        """ConfigError from `sleep` to `wake`."""
        if self._is_asleep:
            raise ConfigError("this LLM sleeps: call wake() first")

    # Weights

    def accept(self, params: Any) -> Params:
        """Weights of any form as Params that can be bound; ConfigError where they cannot be."""
        fresh = as_params(params, None if isinstance(params, Params) else self.model_config)
        if fresh.config != self.model_config:
            own = self.model_config
            raise ConfigError(f"params of another architecture: {fresh.config} is not {own}")
        self.weights.check_dtypes(fresh)
        return fresh

    def bind(self, params: Params, *, donate: bool = False, draft: Params | None = None) -> None:
        """Serve these weights from the next step on, or once awake; new ones drop the prefixes.
        donate: delete the old ones' arrays, whoever holds them, but those that the new ones share.
        draft: what guesses from now on, None leaves it as it is.
        """
        if donate:
            _delete(self.params, kept=params)
        if self.draft is not None:
            self.draft.params = draft or self.draft.params
        if not self._is_asleep:
            _renew(self, params)
        self.params = params
        if self._is_asleep or not self.has_pool:
            return
        self.runner.params = self.weights.modules(params)
        self.runner.weight_version = self.weights.version
        if self._cached_version != self.weights.version:
            self.engine.reset_prefix_cache()
            self._cached_version = self.weights.version

    def unbind(self) -> None:
        """Let go of the caller's weights; copies that were made of them for serving stay."""
        self.params = None
        if self.draft is not None and not self.draft.is_own:
            self.draft.params = None
        if self.has_pool:
            self.runner.params = self.runner.draft_params = None

    # The pool

    def start(self, num_blocks: int | None = None) -> None:
        """Make the engine over a pool of so many blocks; None: of num_blocks, or what memory holds.
        Weights must be bound. The last engine goes once the new one is made.
        """
        num_blocks = num_blocks or _most_blocks(self)
        config = dataclasses.replace(self.engine_config, num_blocks=num_blocks)
        runner, replicas = _runner(self, config), self.placement.replicas
        depth = DISPATCHES_IN_FLIGHT
        self._engine = Engine(config, runner, num_replicas=replicas, depth=depth)
        self._cached_version = self.weights.version

    def reserve(self, sizes: Iterable[int]) -> None:
        """If it grows, have a pool that holds sequences of so many blocks each, as far as they
        run at once. It has a power of two of blocks, or num_blocks. No request may be unfinished.
        """
        if not self._grows:
            return
        pinned = self.engine_config.num_blocks
        held = (self.engine.config.num_blocks or 0) if self.has_pool else 0
        longest = sorted(sizes, reverse=True)[: self.engine_config.max_num_seqs]
        needed = max(sum(longest), LEAST_BLOCKS)
        if held and (needed <= held or pinned is not None):
            return
        power_of_two = 1 << (needed - 1).bit_length()
        blocks = pinned or min(power_of_two, _most_blocks(self))
        if blocks > held:
            if held:
                log.info(
                    "the KV pool grows from %d to %d blocks: steps compile again", held, blocks
                )
            self.start(blocks)

    def release(self) -> None:
        """Free the pool, its prefixes and the weights' copies, which the next `bind` and dispatch
        make again; compiled steps stay.
        """
        _release_weights(self)
        if self.has_pool:
            self.engine.reset_prefix_cache()
            self.runner.release()
            self.runner.params = self.runner.draft_params = None

    def sleep(self) -> None:
        """Release until `wake`; no request may be unfinished."""
        self.release()
        self._is_asleep = True

    def wake(self) -> None:
        """Allocate the pool again; CapacityError where the memory is not there: it sleeps on."""
        runner = self.runner
        if not self._is_asleep or self.params is None:
            return
        self._is_asleep = False
        try:
            self.bind(self.params)
            runner.allocate()
        except BaseException:
            self.sleep()
            raise

    def close(self) -> None:
        """Let go of everything on the device, requests too; of no use afterwards."""
        self._engine = self.params = None
        self._is_asleep = False
        _release_weights(self)

    def step(self) -> list[Request]:
        """One step of the engine; the requests that ended."""
        try:
            return self.engine.step()
        except RuntimeError as e:
            if any(is_deleted(leaf) for leaf in jax.tree.leaves(self.params)):
                raise ConfigError(
                    f"params hold a deleted array: {DONATED} Pass new ones to update_params"
                ) from e
            raise

    def report(self) -> dict[str, Any]:
        """Totals of engine and device since the start, and the version of the weights."""
        totals = self.engine.report() | self.runner.report()
        return totals | self.weights.report() | self.adapters.report()

    def snapshot(self, **face: Any) -> Snapshot:
        """The unfinished requests and a copy of the blocks in use; face: a face's own fields."""
        engine, version = self.engine, self.weights.version
        state = engine.snapshot()
        return Snapshot(owner=engine.identity, weight_version=version, engine=state, **face)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this session and these weights; RequestError for any other."""
        self.check_awake()
        engine = self.engine
        if snapshot.owner is not engine.identity:
            raise RequestError("snapshot of another LLM, or of a pool that has since been replaced")
        if (taken := snapshot.weight_version) != (version := self.weights.version):
            said = f"snapshot of weight version {taken}: its KV is not that of {version}"
            raise RequestError(said)
        engine.restore(snapshot.engine)


def _runner(session: Session, config: EngineConfig) -> Runner:
    assert session.params is not None, "bind weights first"
    model = session.weights.modules(session.params)
    kind = SharedRunner if are_many(session.placement.mesh) else Runner
    drafts = None if session.draft is None else session.draft.modules()
    runner = kind(session.model_config, config, session.placement, model, drafts, session.choices)
    runner.weight_version = session.weights.version
    if config.strict:
        warmup(runner.steps)
        runner.seal()
    return runner


def _most_blocks(session: Session) -> int:
    """Blocks of the default pool, which is also as far as a pool grows. What compiled steps need
    does not depend on the pool: they are asked once.
    """
    config, where = session.engine_config, session.placement
    if config.num_blocks is not None:
        return config.num_blocks
    assert session.params is not None, "bind weights first"
    model = session.weights.modules(session.params)
    drafts = None if session.draft is None else session.draft.modules()
    held = session.runner.pool_bytes if session.has_pool else 0
    how: dict[str, Any] = {"draft": drafts, "freed": held, "needs": session.needs}
    how["choices"] = session.choices
    plan = plan_pool(session.model_config, config, where, model, **how)
    session.needs = plan.needs if plan.needs.is_measured else None
    return least(plan.num_blocks) if are_many(where.mesh) else plan.num_blocks


def _release_weights(session: Session) -> None:
    session.weights.release()
    if session.draft is not None:
        session.draft.weights.release()


def accept_draft(session: Session, draft: Any) -> Params | None:
    """Weights of the draft model that can be bound, None where there are none; ConfigError."""
    if draft is None:
        return None
    if session.draft is None:
        raise ConfigError("draft weights need speculative={'method': 'draft' or 'eagle'}")
    return session.draft.accept(draft)


def add_adapter(session: Session, name: Any, source: Any) -> int:
    """Take an adapter under a name, in place of the one that had it; its version. ConfigError where
    it cannot be served.
    """
    made = session.adapters.made(source, check_name(name))
    check_fits([made], session.engine_config)
    session.adapters.named[name] = made
    return made.version


def adapted(session: Session, prompts: list[Any], lora: Any) -> list[Any]:
    """The prompts of a call with its adapters, one for all or a list, in tables that hold them:
    larger ones if they grow; ConfigError where those that there are do not do.
    """
    if lora is None:
        return prompts
    adapters = session.adapters.of_call(match_adapters(lora, len(prompts)))
    asked = list({a.version: a for a in adapters if a is not None}.values())
    config = session.engine_config
    config = grown(config, asked) if session.adapters.grows and asked else config
    if config != session.engine_config:
        log.info("adapters take %d slots: steps compile again", config.max_loras)
        session.engine_config, session.needs = config, None
        if session.has_pool:
            session.start(session.engine.config.num_blocks)
    check_fits(asked, config)
    return [Adapted(*pair) for pair in zip(prompts, adapters, strict=True)]


def _renew(session: Session, params: Params) -> None:
    """Make the serving weights of params; the last version's copies go first, and come back where
    that fails.
    """
    if session.has_pool:
        session.runner.params = session.runner.draft_params = None
    try:
        session.weights.update(params)
        _renew_draft(session)
    except BaseException:
        if session.has_pool and session.params is not None:
            session.weights.update(session.params)
            session.runner.params = session.weights.modules(session.params)
            session.runner.weight_version = session.weights.version
            _renew_draft(session)
        raise


def _renew_draft(session: Session) -> None:
    if (draft := session.draft) is None:
        return
    if draft.params is None:
        raise ConfigError("this model was given a draft model before: pass draft= again")
    draft.weights.update(draft.params)
    if session.has_pool:
        session.runner.draft_params = draft.modules()[1]


def _delete(params: Params | None, *, kept: Params) -> None:
    shared = {id(leaf) for leaf in jax.tree.leaves(kept)}
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and id(leaf) not in shared and not leaf.is_deleted():
            leaf.delete()
