"""ServedModel: the weights of one model as a pool's steps take them, with draft weights and
adapters.
"""

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jpaged.adapters import Adapters, check_fits, grown
from jpaged.checkpoint.load import read_params
from jpaged.combinations import Facts, check_combination
from jpaged.config import EngineConfig
from jpaged.drafts import draft_model, no_head
from jpaged.engine.adapters import AdapterVersion
from jpaged.engine.types import Report
from jpaged.errors import ConfigError
from jpaged.models.params import DONATED, Params
from jpaged.models.quantized import experts_are_plain
from jpaged.request.inputs import match_adapters
from jpaged.runtime.choices import interleaves_at
from jpaged.runtime.compiled_steps import use_compilation_cache
from jpaged.runtime.footprint import with_rows_beside
from jpaged.runtime.identity import weights_digest
from jpaged.runtime.resolve import resolve
from jpaged.runtime.weights import ServingWeights, as_params, is_deleted, place_params
from jpaged.served_pool import Pool, Served
from jpaged.types import PyTree


class ServedModel:
    """One model, whose pool runs requests once `bind` has given it weights and the pool has been
    made.

    params: tell form and place of the weights; their arrays are left alone. config: as the caller
    wrote it; that of the pool is the resolved one. grows: the pool is made and enlarged as calls
    need it. draft: weights that guess for them. Raises ConfigError.
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
        self._keeps_choices = config.routed_experts
        params = self._told(params) if self._keeps_choices else params
        self.model_config = no_head(params.config)
        use_compilation_cache(config.compilation_cache_dir)
        self.placement = placement = place_params(params, config, mesh)
        dtype, is_plain = config.dtype or params["embed"]["weight"].dtype, experts_are_plain(params)
        self.dtype = np.dtype(dtype)  # of what is computed; quantized weights are made into it
        config = with_rows_beside(params, config, placement, dtype, is_plain)
        resolved, choices = resolve(params.config, config, placement, dtype, is_plain)
        self.draft = draft_model(draft, params.config, resolved, placement, dtype, params.source)
        has_state = self.model_config.has_state
        if self.draft is not None:
            choices = dataclasses.replace(choices, draft=self.draft.choices(resolved, placement))
            has_state |= self.draft.model_config.has_state
        check_combination(Facts(config=resolved, has_state=has_state))
        self.weights = ServingWeights(
            placement,
            config.dtype,
            config.quantization,
            interleaved=interleaves_at(placement, dtype, config),
        )
        self.adapters = Adapters(params.config, placement.axis_size, dtype)
        # Whether a call may ask for larger tables of adapters.
        self._grows_tables = grows and not config.max_loras
        self.pool = Pool(
            self.model_config, resolved, placement, choices, has_state=has_state, grows=grows
        )
        self.params: Params | None = None  # those bound now
        # Of the folders that `accept` has read: bytes of this process's devices, and seconds.
        self._read_bytes, self._read_seconds = 0, 0.0
        self._is_asleep = False
        self._identity: tuple[int, bytes] | None = None  # of the version of the weights
        self._identity_s = 0.0  # what it took, of all versions

    def accept(self, params: PyTree) -> Params:
        """Return weights of any form, or those of a checkpoint folder, as Params that can be bound;
        ConfigError where they cannot be.
        """
        if isinstance(params, str | Path):
            mesh, config = self.placement.mesh, self.pool.config
            assert not isinstance(mesh, AbstractMesh), "nothing is served on it"
            quantization = None if mesh else config.quantization
            began = time.perf_counter()
            params = read_params(
                params,
                dtype=config.dtype,
                mesh=mesh,
                quantization=quantization,
                interleaves=lambda _: self.weights.interleaved,
                images=self.model_config.vision is not None,
            )
            self._read_seconds += time.perf_counter() - began
            self._read_bytes += sum(map(_bytes_here, jax.tree.leaves(params)))
        known = None if isinstance(params, Params) else self.model_config
        fresh = as_params(params, known)
        fresh = self._told(fresh) if self._keeps_choices else fresh
        if fresh.config != self.model_config:
            ours = self.model_config
            raise ConfigError(f"params of another architecture: {fresh.config} is not {ours}")
        self.weights.check_dtypes(fresh)
        return fresh

    def accept_draft(self, draft: PyTree) -> Params | None:
        """Return weights of the draft model that can be bound, None where none are passed;
        ConfigError where they cannot be.
        """
        if draft is None:
            return None
        check_combination(Facts(config=self.pool.config, has_draft_weights=True))
        assert self.draft is not None
        return self.draft.accept(draft)

    def bind(self, params: Params, *, donate: bool = False, draft: Params | None = None) -> None:
        """Serve these weights from the next step on, or once awake; new ones drop the prefixes.

        donate: delete the old ones' arrays, whoever holds them, but those that the new ones share.
        draft: what guesses from now on, None leaves it as it is. Where this fails, the weights that
        were bound are served again.
        """
        params = self._told(params) if self._keeps_choices else params
        if donate:
            _delete(self.params, kept=params)
        before = None if self.draft is None else self.draft.params
        if self.draft is not None and draft is not None:
            self.draft.params = draft
        if self._is_asleep:
            self.params = params
            return
        self.pool.serve(None)  # so that the last version's copies go before new ones are made
        try:
            served = self._updated(params)
        except BaseException:
            if self.draft is not None:
                self.draft.params = before
            if self.params is not None:
                self.pool.serve(self._updated(self.params))
            raise
        self.params = params
        self.pool.serve(served)

    def bind_again(self, params: Params) -> bool:
        """Bind weights if they are those that were bound last: the same arrays, all alive. Return
        whether they are. A model with a draft model is left to `bind`.
        """
        params = self._told(params) if self._keeps_choices else params
        modules = None if self.draft is not None else self.weights.again(params)
        if modules is None:
            return False
        self.params = params
        has_files, version = self.pool.config.prefix_store is not None, self.weights.version
        identity = self._identity_of(params) if has_files else None
        self.pool.serve(Served(modules, None, version, identity))
        return True

    def unbind(self) -> None:
        """Let go of the caller's weights; copies that were made of them for serving stay."""
        self.params = None
        if self.draft is not None and not self.draft.is_own:
            self.draft.params = None
        self.pool.serve(None)

    def release(self) -> None:
        """Free the pool, its prefixes and the weights' copies, which the next `bind` and dispatch
        make again; compiled steps stay.
        """
        self.pool.release()
        self.weights.release()
        if self.draft is not None:
            self.draft.weights.release()

    def sleep(self) -> None:
        """Release until `wake`; no request may be unfinished."""
        self.release()
        self._is_asleep = True

    def wake(self) -> None:
        """Allocate the pool again; CapacityError where the memory is not there: it sleeps on."""
        _ = self.pool.runner  # ConfigError where there is none any more
        if not self._is_asleep or self.params is None:
            return
        self._is_asleep = False
        try:
            self.bind(self.params)
            self.pool.allocate()
        except BaseException:
            self.sleep()
            raise

    def close(self) -> None:
        """Let go of everything on the device, requests too; of no use afterwards."""
        self.pool.close()
        self.params = None
        self._is_asleep = False
        self.weights.release()
        if self.draft is not None:
            self.draft.weights.release()

    def check_awake(self) -> None:
        """Raise ConfigError from `sleep` to `wake`."""
        if self._is_asleep:
            raise ConfigError("this LLM sleeps: call wake() first")

    def check_alive(self, cause: Exception) -> None:
        """Raise ConfigError if a step may have failed because arrays of the weights are gone."""
        if any(is_deleted(leaf) for leaf in jax.tree.leaves(self.params)):
            raise ConfigError(
                f"params hold a deleted array: {DONATED} Pass new ones (an LLM: to update_params)"
            ) from cause

    def add_adapter(self, name: object, source: PyTree, shared_salt: bytes | None = None) -> int:
        """Take an adapter under a name, in place of the one that had it; return its version.
        shared_salt: see AdapterVersion. ConfigError where it cannot be served.
        """
        return self.adapters.add(name, source, self.pool.config, shared_salt)

    def adapters_of(
        self, lora: PyTree, count: int, drained: Callable[[], AbstractContextManager[None]]
    ) -> list[AdapterVersion | None]:
        """Return the adapter of each of so many prompts, from one for all or a list. The pool has
        tables that hold them afterwards: larger ones if they grow, which are made inside the
        block of `drained`, else ConfigError.
        """
        if lora is None:
            return [None] * count
        adapters = self.adapters.of_call(match_adapters(lora, count))
        asked = list({a.version: a for a in adapters if a is not None}.values())
        if self._grows_tables and asked and grown(self.pool.config, asked) != self.pool.config:
            with drained():
                larger = grown(self.pool.config, asked)
                if larger != self.pool.config:  # else another thread has enlarged them meanwhile
                    self.pool.resize_tables(larger)
        check_fits(asked, self.pool.config)
        return adapters

    def report(self) -> Report:
        """Return the version of the weights, what it cost to read and to make, and the adapters'
        versions.
        """
        read: Report = {"weight_bytes_read": self._read_bytes, "weight_read_s": self._read_seconds}
        if self._identity is not None:
            read["store_identity_s"] = self._identity_s
        return self.weights.report() | read | self.adapters.report()

    def _told(self, params: Params) -> Params:
        """Return weights with the config of what is served: outputs say which experts tokens took,
        and so the cache keeps them.
        """
        return Params(dict(params), params.config.keeping_choices(), params.source)

    def _updated(self, params: Params) -> Served:
        """Make what is served of these params and the draft model's."""
        self.weights.update(params)
        draft = None
        if self.draft is not None:
            if self.draft.params is None:
                raise ConfigError("this model was given a draft model before: pass draft= again")
            self.draft.weights.update(self.draft.params)
            draft = self.draft.modules()
        modules, version = self.weights.modules(params), self.weights.version
        has_files = self.pool.config.prefix_store is not None
        return Served(modules, draft, version, self._identity_of(params) if has_files else None)

    def _identity_of(self, params: Params) -> bytes:
        """Return what the weights of this version are known by in files."""
        version = self.weights.version
        if self._identity is None or self._identity[0] != version:
            began = time.perf_counter()
            draft = None if self.draft is None else self.draft.params
            digest = weights_digest(self.model_config, params, draft)
            self._identity = version, digest
            self._identity_s += time.perf_counter() - began
        return self._identity[1]


def _bytes_here(leaf: jax.Array) -> int:
    """Return the bytes of an array that this process has read, each slice of it once."""
    slices = {str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}
    return sum(slices.values())


def _delete(params: Params | None, *, kept: Params) -> None:
    """Delete the arrays of these params, but those that are in `kept` too."""
    shared = {id(leaf) for leaf in jax.tree.leaves(kept)}
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and id(leaf) not in shared and not leaf.is_deleted():
            leaf.delete()
