"""What the compiled steps need of a device beside weights and pool, and the plan that follows.

Read from XLA's memory_analysis() of the largest steps, compiled over a pool of just enough blocks:
the number of blocks is itself a shape, and temporaries do not depend on it. On CPU, where a compile
is seconds of a cold start, an upper bound by arithmetic stands in wherever the pool comes out the
same.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from jpaged.checks import read_json
from jpaged.combinations import Facts, check_combination
from jpaged.config import ROWS, EngineConfig, reads_mtp_head
from jpaged.engine.shapes import SAMPLERS, PrefillShape, Shape
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from jpaged.models.forward import Forward
from jpaged.models.head_modules import Head, bind_any, fitted
from jpaged.models.hf_config import format_of
from jpaged.models.hf_quantization import Format
from jpaged.models.kv_groups import kv_groups
from jpaged.models.layers.scratch import StepSizes
from jpaged.models.mtp import mtp_config
from jpaged.models.param_spec import ParamSpec
from jpaged.models.params import Params, nest, param_shapes, param_table
from jpaged.models.quantized import is_quantized, quantized, specs_of
from jpaged.models.served import served_form, stored_shapes
from jpaged.runtime import logprobs, sampler
from jpaged.runtime.adapter_tables import (
    adapted_ranks,
    adapter_scratch_bytes,
    table_bytes,
    table_rank,
)
from jpaged.runtime.choices import Choices, interleaves_at
from jpaged.runtime.compiled_steps import compile_step
from jpaged.runtime.embedding_pool import embedding_bytes
from jpaged.runtime.image_rows import tower_scratch
from jpaged.runtime.kv_cache import group_costs, most_blocks, states_a_row, widest_group
from jpaged.runtime.memory import (
    CPU_POOL_BYTES,
    Limits,
    MemoryPlan,
    Needs,
    PoolCost,
    StateCost,
    plan,
)
from jpaged.runtime.mesh import Placement, asked_shape, serving_mesh
from jpaged.runtime.processes import are_many, least
from jpaged.runtime.resolve import resolve
from jpaged.runtime.runner import DraftOf, Runner, choose_for
from jpaged.runtime.step_table import step_table

SCORE_TILE = 64  # tokens whose prompt scores are computed together
TILES = 16 << 20  # bytes of attention's own tiles
# XLA tries a product on a GPU with guards around its arrays and a workspace for cuBLAS.
TRIAL_BYTES = 64 << 20
MOST_ROWS = 1024  # that are planned for an accelerator where nobody chose them
RESIDENT_STEPS = 32  # of a table that is not compiled whole: those that a run is taken to meet


def plan_memory(
    model: ModelConfig | Mapping[str, Any] | str | Path,
    config: EngineConfig | None = None,
    *,
    device: Any = None,
    draft: ModelConfig | Mapping[str, Any] | str | Path | None = None,
    limits: Limits | None = None,
    compiled: bool = True,
) -> MemoryPlan:
    """Return where the memory of one device would go, in bytes, and how many KV blocks it leaves
    room for; no weight is loaded. With tensor_parallel_size it is that of each device that shares
    the model, of as many replicas as data_parallel_size says.

    model: a ModelConfig, a Hugging Face config or a checkpoint folder. config: how to serve it; its
    dtype is what the model is stored in where it names none, else bfloat16. Of files in 8 or 4 bits
    all weights of products but the head's are taken to be (mxfp4: those of experts). device: the
    jax.Device that steps are compiled for, or several of them to share the model; jax's by default.
    draft: a model that guesses for it, or the config of a head's Params; None is with method="mtp"
    the model's own head. limits: of a card that is not here, where layers with a state are taken to
    be XLA's unless device is one of its kind; None is what the device has. compiled=False takes the
    upper bound of what steps need, which is proved for CPUs only. max_num_seqs=None is planned by
    that bound too. Raises ConfigError where no block fits.
    """
    settings = EngineConfig() if config is None else config
    devices = jax.devices() if device is None else list(np.atleast_1d(device))
    settings = with_rows(
        ModelConfig.coerce(model, images=settings.images),
        settings,
        limits is None and devices[0].platform == "cpu",
        lambda asked: plan_memory(
            model, asked, device=device, draft=draft, limits=limits, compiled=False
        ),
    )
    dtype, stored = settings.dtype or stored_dtype(model), _stored_format(model)
    model = ModelConfig.coerce(model, images=settings.images)
    model = model.keeping_choices() if settings.routed_experts else model
    placement = _place(settings, devices, compiled)
    placement.check(settings, model)
    settings, choices = resolve(model, settings, placement, dtype)
    served = placement.served(model)
    interleaved = interleaves_at(placement, dtype, settings)
    params = form_of(
        served, placement, dtype, settings.quantization, stored, interleaved=interleaved
    )
    drafts: DraftOf | None = None
    if draft is None and reads_mtp_head(settings):
        draft = mtp_config(model)
    if draft is not None:
        guesses = ModelConfig.coerce(draft)
        draft_dtype, kept_in = settings.dtype or stored_dtype(draft), settings.quantization
        check_combination(Facts(draft=guesses, devices=placement.axis_size))
        if guesses.is_head:
            guesses, draft_dtype, kept_in = fitted(guesses, model), dtype, None
        served_draft = placement.served(guesses)
        form = form_of(
            served_draft,
            placement,
            draft_dtype,
            kept_in,
            interleaved=interleaves_at(placement, draft_dtype, settings),
        )
        drafts = guesses, form
        choices = dataclasses.replace(choices, draft=choose_for(guesses, settings, placement, form))
    has_state = model.has_state or (drafts is not None and drafts[0].has_state)
    check_combination(Facts(config=settings, has_state=has_state))
    # Params as they are loaded stay beside what is made of them to serve.
    ours = _leaves(params)
    pairs = zip(_leaves(form_of(model, placement, dtype, stored=stored)), ours, strict=True)
    kept = bytes_on_device(
        [
            loaded
            for loaded, made in pairs
            if is_quantized(loaded) != is_quantized(made) or loaded.shape != made.shape
        ]
    )
    weights = bytes_on_device((params, drafts and drafts[1]))
    is_elsewhere = limits is not None and device is None
    if limits is None:
        share, size = settings.memory_utilization, placement.axis_size * placement.replicas
        limits = limits_to_come(placement.device, share, weights + kept, size)
    if kept and not limits.in_use:
        limits = dataclasses.replace(limits, in_use=weights + kept)
    probe = probe_runner(model, settings, placement, params, drafts, choices)
    return plan_within(settings, limits, probe, compiled, is_elsewhere=is_elsewhere)


def with_rows(
    model: ModelConfig,
    config: EngineConfig,
    on_cpu: bool,
    plan_of: Callable[[EngineConfig], MemoryPlan],
) -> EngineConfig:
    """Return the config with max_num_seqs filled in where it is None: as many rows as memory holds
    states for, to a thirtieth; ROWS for a model that keeps no state. plan_of: plans for a number of
    rows, and compiles nothing.
    """
    if config.max_num_seqs is not None:
        return config
    if not model.has_state:
        return dataclasses.replace(config, max_num_seqs=ROWS)

    fitting, most = 0, min([ROWS if on_cpu else MOST_ROWS, *(config.seq_buckets or ())[-1:]])
    rows = most
    while True:
        fits = 0
        with contextlib.suppress(ConfigError):  # not one block; the caller meets it where none fit
            plan = plan_of(dataclasses.replace(config, max_num_seqs=rows))
            if plan.waste >= 0:
                # As many as there are states for fit, since fewer rows need less beside them.
                fits = rows if plan.num_seqs == plan.max_num_seqs else plan.num_seqs
        fitting, most = max(fitting, fits), most if fits == rows else rows - 1
        if most - fitting <= fitting // 32:
            return dataclasses.replace(config, max_num_seqs=max(fitting, 1))
        rows = (fitting + most + 1) // 2


def with_rows_beside(
    params: Params, config: EngineConfig, placement: Placement, dtype: Any, is_plain: bool
) -> EngineConfig:
    """Return `with_rows` for weights that lie on the devices of a place, or will. A draft model's
    share is not counted, nor copies of the weights in another dtype: where those leave less,
    fewer rows run, with a warning. dtype, is_plain: as of resolve.
    """
    if config.max_num_seqs is not None:
        return config
    model = params.config
    if model.has_state:  # ConfigError where nobody says what memory there is
        Limits.of(placement.device, config.memory_utilization)
    served = placement.served(model)
    leaves, structure = jax.tree.flatten(params)
    form = form_of(served, placement, dtype, config.quantization)
    if config.quantization is None and all(isinstance(x, jax.Array) for x in leaves):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
        form = bind_any(served, jax.tree.unflatten(structure, shapes))

    def plan_of(asked: EngineConfig) -> MemoryPlan:
        resolved, choices = resolve(model, asked, placement, dtype, is_plain)
        return plan_pool(model, resolved, placement, form, choices=choices, compiled=False)

    planned = with_rows(model, config, placement.device.platform == "cpu", plan_of)
    rows = planned.num_rows
    rows = least(rows) if are_many(placement.mesh) else rows
    return dataclasses.replace(planned, max_num_seqs=rows)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_quantized)


def _place(config: EngineConfig, devices: list[Any], compiled: bool) -> Placement:
    """Return as many of the devices as are asked for; where nothing is compiled, a mesh of devices
    that need not be.
    """
    shape = asked_shape(config)
    mesh: Any = serving_mesh(config, None, devices) if compiled else None
    if shape and mesh is None:
        kinds = (AxisType.Auto,) * len(shape)
        mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=kinds)
    return Placement(
        mesh=mesh,
        axis="tp" if "tp" in shape else None,
        device=devices[0],
        expert_parallel=config.expert_parallel,
    )


def form_of(
    model: ModelConfig,
    placement: Placement,
    dtype: Any,
    quantization: str | None = None,
    stored: Format | None = None,
    *,
    interleaved: bool = False,
) -> Forward | Head:
    """Return the modules of a model with ShapeDtypeStructs in place of arrays, split as they lie at
    a place. stored: the format of the files that the weights come from. interleaved: as of
    ServingWeights.
    """

    def shape_of(spec: ParamSpec) -> Any:
        kept = (
            None if stored is None else stored_shapes(spec, stored, dtype, interleaved=interleaved)
        )
        if kept is not None:
            return kept
        plain = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype))
        form = served_form(spec, model, quantization, placement.axis_size, interleaved=interleaved)
        if form is None:
            return plain
        return jax.eval_shape(lambda x: quantized(x, form, len(spec.sides[0])), plain)

    tree = nest({name: shape_of(spec) for name, spec in param_table(model).items()})
    specs = specs_of(tree, placement.specs(model))
    tree = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.sharding(spec)),
        tree,
        specs,
    )
    return bind_any(model, tree)


def limits_to_come(device: Any, utilization: float, weights: int, devices: int = 1) -> Limits:
    """The limits of a device that is here, once so many bytes of weights lie on it too; and on each
    of so many devices, of which virtual ones on a CPU share one memory.
    """
    limits = Limits.of(device, utilization)
    if limits.pool is None:
        block = None if limits.block is None else limits.block - weights
        return dataclasses.replace(limits, in_use=limits.in_use + weights, block=block)
    pool = max(min(CPU_POOL_BYTES, (limits.total - weights * devices) // 2), 0)
    return dataclasses.replace(limits, total=limits.total // devices, pool=pool // devices)


def _stored_format(model: ModelConfig | Mapping[str, Any] | str | Path) -> Format | None:
    """Return how the weights of a checkpoint lie, by its config; None is plain."""
    if isinstance(model, str | Path):
        model = read_json(Path(model) / "config.json")
    return format_of(model) if isinstance(model, Mapping) else None


def stored_dtype(model: ModelConfig | Mapping[str, Any] | str | Path) -> str:
    """Return the dtype of a checkpoint's weights, by its config; bfloat16 if that has none."""
    if isinstance(model, str | Path):
        model = read_json(Path(model) / "config.json")
    raw = model if isinstance(model, Mapping) else {}
    return raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"


def plan_pool(
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    params: Any,
    *,
    draft: DraftOf | None = None,
    freed: int = 0,
    needs: Needs | None = None,
    choices: Choices | None = None,
    compiled: bool = True,
) -> MemoryPlan:
    """Return the plan of the machine at hand, for a resolved config and serving trees that lie on
    its devices.

    draft: of a draft model. freed: bytes on a device that the engine itself will free first (the
    pool that a larger one replaces). needs: what an earlier plan measured, so that nothing is
    compiled. choices: as of Runner. compiled: as of plan_within.
    """
    limits = Limits.of(placement.device, config.memory_utilization)
    weights = bytes_on_device((params, draft and draft[1]))
    if limits.pool is None:
        block = None if limits.block is None else max(limits.block, freed)
        limits = dataclasses.replace(limits, in_use=limits.in_use - freed, block=block)
    else:  # virtual CPU devices share one memory, of which the weights have been taken already
        devices = 1 if placement.mesh is None else placement.mesh.size
        limits = Limits(
            total=limits.total // devices + weights + freed, pool=limits.pool // devices
        )
    probe = probe_runner(model, config, placement, params, draft, choices)
    return plan_within(config, limits, probe, compiled, needs)


def plan_within(
    config: EngineConfig,
    limits: Limits,
    probe: Runner,
    compiled: bool = True,
    needs: Needs | None = None,
    is_elsewhere: bool = False,
) -> MemoryPlan:
    """Return the plan of one device; steps are compiled, if they may be, unless their needs are
    known, or the bound holds (on CPU) and leaves the pool as it would be. is_elsewhere: the limits
    are of another kind of device than the one at hand, and so may be the kernels.
    """
    weights = bytes_on_device((probe.params, probe.draft_params))
    pool, draft = _pool_cost(probe, config), probe.draft_model
    share = probe.placement.share_of(probe.model)
    if needs is not None:
        return plan(config, limits, pool=pool, weights=weights, needs=needs)
    chosen = None if is_elsewhere else probe.compiled.setting.choices
    needs = bound(share, config, probe.pools[0].dtype, pool.moved(config), chosen)
    # What two steps in flight keep for a replay.
    kept = 2 * probe.compiled.setting.replayed_bytes
    needs = dataclasses.replace(needs, temporaries=needs.temporaries + kept)
    if draft is not None:
        of_draft = probe.placement.share_of(draft)
        of_guesses = None if chosen is None else chosen.draft
        more = bound(of_draft, config, probe.pools[-1].dtype, choices=of_guesses)
        copied = probe.compiled.setting.copied_bytes
        temporaries = needs.temporaries + more.temporaries + copied
        needs = dataclasses.replace(needs, temporaries=temporaries)
    tower = tower_scratch(probe.model, config)
    needs = dataclasses.replace(needs, tower=tower)
    largest = pool.of(pool.in_use or 0)
    largest = largest if limits.pool is None else min(largest, limits.pool)
    is_cpu = probe.placement.device.platform == "cpu"
    kernels = [pool.kernel for pool in probe.pools if pool.kernel is not None]
    holds = is_cpu and not any(kernel.interpret for kernel in kernels)
    if compiled and (not holds or weights + needs.total + largest > limits.total):
        needs = dataclasses.replace(measured(probe, pool.moved(config)), tower=tower)
    if limits.is_gpu:
        trials = autotuning_bytes(share, config, probe.pools[0].dtype)
        needs = dataclasses.replace(needs, autotuning=trials)
    return plan(config, limits, pool=pool, weights=weights, needs=needs)


def _pool_cost(probe: Runner, config: EngineConfig) -> PoolCost:
    """Return what the pools of a runner's models take of a device."""
    most, widest = most_blocks(probe.model, config), widest_group(probe.model, config)
    count = len(most)
    costs = group_costs(probe.model, config, probe.pools[:count])
    if probe.draft_model is not None:
        most_of_draft = most_blocks(probe.draft_model, config)
        costs += group_costs(probe.draft_model, config, probe.pools[count:])
        most = most + most_of_draft
    of_states = [i for i, cost in enumerate(costs) if cost is None]
    keys = [cost for cost in costs if cost is not None]
    state_bytes = sum(probe.pools[i].device_block_bytes for i in of_states)
    most_states = most[of_states[-1]] if of_states else 0
    states = None
    if state_bytes:
        states = StateCost(
            nbytes=state_bytes,
            a_row=states_a_row(config),
            blocks_a_row=config.max_blocks_per_seq,
            most=most_states,
            # Beside a number of blocks that is set, all of them.
            pinned=config.num_states if config.num_blocks is None else most_states,
        )
    return PoolCost(tuple(keys), in_use=most[widest], states=states)


def probe_runner(
    model: ModelConfig,
    config: EngineConfig,
    placement: Placement,
    params: Any,
    draft: DraftOf | None = None,
    choices: Choices | None = None,
) -> Runner:
    """Return a runner to compile with and never to run: over the smallest pool whose block tables
    are as wide as can be.

    params: the serving tree, or ShapeDtypeStructs with shardings in its place.
    """
    models = [model] if draft is None else [model, draft[0]]
    few = states_a_row(config) if any(of.has_state for of in models) else None
    config = dataclasses.replace(config, num_blocks=config.max_blocks_per_seq, num_states=few)
    return Runner(model, config, placement, params, draft, choices)


def largest_buckets(table: Iterable[Shape]) -> list[Shape]:
    """Return of each phase the shape that does most, then the one with most tokens and rows: no
    other of the phase needs more memory.
    """
    ascending = sorted(table, key=_needs)
    return list({shape.phase: shape for shape in ascending}.values())


def _needs(shape: Shape) -> tuple[int, ...]:
    """Return a key that rises with the memory that a shape of a phase needs."""
    richness = -1 if shape.sampler is None else SAMPLERS.index(shape.sampler)
    scores = isinstance(shape, PrefillShape) and shape.scores
    return richness, scores, shape.tokens, shape.rows, shape.loras


def measured(probe: Runner, moved: int) -> Needs:
    """Return what the compiled steps say; compiles the largest of each phase, draws under masks
    too: any engine may come to need them. moved: as of state_bytes.
    """
    config = dataclasses.replace(probe.config, structured_output=True)
    table = step_table(dataclasses.replace(probe.compiled.setting, config=config))
    share = probe.placement.share_of(probe.model)
    lowered = [probe.compiled.lower(bucket) for bucket in largest_buckets(table)]
    with ThreadPoolExecutor() as threads:  # side by side: each takes a minute on a GPU
        platform = probe.placement.device.platform
        compiled = threads.map(lambda step: compile_step(step, platform), lowered)
        analyses = [step.memory_analysis() for step in compiled]
    # With results of their own: those that do not take an argument's place.
    temporaries = max(
        m.temp_size_in_bytes + max(m.output_size_in_bytes - m.alias_size_in_bytes, 0)
        for m in analyses
    )
    # None on CPU and CUDA, megabytes a step on TPUs.
    code = max(m.generated_code_size_in_bytes for m in analyses)
    return Needs(
        temporaries=temporaries,
        code=code * (len(table) if probe.config.strict else min(len(table), RESIDENT_STEPS)),
        state=state_bytes(share, probe.config, moved)
        + table_bytes(share, probe.config, probe.adapters.dtype)
        + embedding_bytes(share, probe.config, probe.adapters.dtype),
        source=f"compiled for {probe.placement.device.device_kind}",
        is_measured=True,
    )


def state_bytes(model: ModelConfig, config: EngineConfig, moved: int) -> int:
    """Return the bytes that a device keeps of every row, and of blocks on their way to the host,
    before each of two steps in flight, and back. moved: bytes of the blocks of one move.
    """
    rows = 4 * config.num_rows * (2 + model.vocab_size)
    has_store = config.swap_space_gib or config.prefix_store is not None
    moving = 3 * moved if has_store else 0
    return rows + moving


def autotuning_bytes(model: ModelConfig, config: EngineConfig, dtype: Any) -> int:
    """Return the bytes that XLA takes to try the largest product of a step on a GPU, beside what
    the steps that run have: arrays of its own for the weight, the inputs and twice the results, the
    second to compare with (gpu_profiler.cc). Weights in 8 or 4 bits count as what they stand for;
    kernels of experts are not tried. model: what a device has (see share_of).
    """
    assert config.token_buckets is not None and config.seq_buckets is not None
    rows = config.seq_buckets[-1]
    tokens, width = max(config.token_buckets[-1], rows), jnp.dtype(dtype).itemsize

    def trial(rows: int, outputs: int, inputs: int) -> int:
        return width * (outputs * inputs + rows * inputs) + 8 * rows * outputs

    head = trial(rows, model.vocab_size, model.hidden_size)
    specs = [spec for spec in param_table(model).values() if spec.is_multiplied]
    plain = [spec for spec in specs if spec.layer is not None and "X" not in spec.sides[0]]
    sides = [[math.prod(spec.shape_of(side)) for side in spec.axes.split(",")] for spec in plain]
    return TRIAL_BYTES + max([head, *(trial(tokens, *side) for side in sides)])


def bound(
    model: ModelConfig,
    config: EngineConfig,
    dtype: Any,
    moved: int = 0,
    choices: Choices | None = None,
) -> Needs:
    """Needs that no step on CPU exceeds, by either kernel of attention; nothing is compiled. model:
    what a device has (see share_of). moved: as of state_bytes. choices: what computes layers with a
    state; None is XLA, which needs most.

    It sums what the layers, the sampler, the scores of prompts and the adapters say that they
    allocate, and float16 weights in f32 (bfloat16 ones are multiplied as they are). Steps use up to
    two thirds of it.
    """
    assert config.token_buckets is not None and config.seq_buckets is not None
    rows, vocab = config.seq_buckets[-1], model.vocab_size
    tokens = max(config.token_buckets[-1], rows)
    adapted = adapted_ranks(config)
    sizes = StepSizes(
        tokens=tokens,
        short=8 * rows + 1024,
        itemsize=jnp.dtype(dtype).itemsize,
        hidden_size=model.hidden_size,
        expert_adapter_rank=adapted if "experts" in config.lora_extra else 0,
        adapter_rank=table_rank(config) if config.max_loras else 0,
        sequences=rows,
        delta=None if choices is None else choices.delta,
        scan=None if choices is None else choices.scan,
    )
    layers = model.scratch(sizes)
    logits = sampler.scratch_bytes(rows, vocab) + logprobs.scratch_bytes(SCORE_TILE, vocab)
    adapters = adapter_scratch_bytes(config, tokens, rows + SCORE_TILE, vocab)
    shapes = jax.tree.leaves(param_shapes(model), is_leaf=lambda node: isinstance(node, tuple))
    weights = 4 * sum(map(math.prod, shapes)) if jnp.dtype(dtype) == jnp.float16 else 0
    ids = 2 * (config.max_logprobs + config.max_sampling_mask) + config.max_logit_bias
    tables = len(kv_groups(model)) * config.max_blocks_per_seq
    indices = 4 * rows * (tokens + tables + ids) + sizes.rows * 8 * config.max_logprobs
    temporaries = layers.shared + layers.kept + logits + adapters + weights + indices + TILES
    return Needs(
        temporaries=temporaries,
        state=state_bytes(model, config, moved)
        + table_bytes(model, config, dtype)
        + embedding_bytes(model, config, dtype),
        source="an upper bound",
    )


def bytes_on_device(tree: Any) -> int:
    """Return the bytes of a tree of placed arrays (or ShapeDtypeStructs) on one of its devices."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
