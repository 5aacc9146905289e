"""What goes with what: every rule about two settings, or a setting and the model or the machine.

A rule is a function below. Its parameters are the facts that it needs, its docstring says what must
hold, and it returns the message of the error where that does not hold. `check_combination` asks all
rules whose facts are known: EngineConfig.resolve knows the config and the model, a session knows
the devices, and so on. docs/combinations.md prints this table (scripts/print_combinations.py).

Rules about one value alone ("must be at least 1") are with the field, in config.py; limits of one
request (max_logprobs, max_n) are checked by SamplingParams.validate.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jpaged.errors import ConfigError, JpagedError, RequestError, UnsupportedError

# The modules that define these types import this one, which reads their fields and nothing else.
type EngineConfig = Any
type Speculative = Any
type ModelConfig = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known when a combination is checked; None means "not known here".

    config: as the caller wrote it, or resolved. speculative: the setting itself, before a config
    has it. model, draft: architectures of the model and of what guesses for it (a smaller model or
    a head). has_draft_weights: whether the caller passed weights of a draft.

    has_state: whether layers of the model, or of what guesses for it, keep a state a sequence.

    has_experts: whether layers of the model are mixtures of experts. num_experts: of one of them.
    taken_experts: how many a token takes in each layer that has any.
    holders: how many devices share whole experts.

    devices: how many share the model. replicas: copies of it. processes: how many hold the mesh.
    available: the devices that there are. mesh_axes: the names of the mesh's axes. heads: query
    heads and KV heads of a layer.

    is_batch_invariant: whether a row's bits are the same in any batch without pinned steps.
    states_are_alike: whether the bits of states depend neither on the batch nor on where a step
    begins; also where there are none.
    no_exact: why a forward pass over whole sequences cannot have the bits of serving, "" where
    nothing speaks against it.
    activations: the setting quantized_activations. no_cpu_products: why the C++ products of CPUs
    cannot run, "" where they can. no_kernel: why the attention kernel that was named cannot run, ""
    where it can.

    weight: the name of one parameter. inputs: how many inputs of it a device has. group: how many
    of them share a scale; 1 where that sets no limit. form: the form (int8, int4, fp8) that it was
    loaded in. served_form: the form that it is to be served in. uneven_split: how its values or
    scales would split into unequal shares, "" where shares are equal.
    is_rearranged: so many devices need copies of its KV heads, or padding of its vocabulary.

    linear_dtypes: the dtypes of all weights of products. dtypes: of all weights, in order.
    built_dtypes: those that steps were compiled for. keeps_forms: whether every weight lies in the
    form that steps were compiled for.

    has_thread: whether a thread of the LLM's own steps it.

    adapter_rank, adapter_changes: of an adapter. draws_masked, scores_masked: a request wants
    tokens of a given form, or the scores of such a text. scores_more: a call wants more of scores
    than logprobs. num_embedded: tokens of a prompt that have embeddings in their place.
    num_images: of a prompt.
    """

    config: EngineConfig | None = None
    speculative: Speculative | None = None
    model: ModelConfig | None = None
    draft: Any = None
    has_draft_weights: bool | None = None
    has_state: bool | None = None
    has_experts: bool | None = None
    num_experts: int | None = None
    taken_experts: tuple[int, ...] | None = None
    holders: int | None = None
    devices: int | None = None
    replicas: int | None = None
    processes: int | None = None
    available: int | None = None
    mesh_axes: tuple[str, ...] | None = None
    heads: tuple[int, int] | None = None
    is_batch_invariant: bool | None = None
    states_are_alike: bool | None = None
    no_exact: str | None = None
    activations: str | None = None
    no_cpu_products: str | None = None
    no_kernel: str | None = None
    weight: str | None = None
    inputs: int | None = None
    group: int | None = None
    form: str | None = None
    served_form: str | None = None
    uneven_split: str | None = None
    is_rearranged: bool | None = None
    linear_dtypes: Collection[str] | None = None
    dtypes: Sequence[str] | None = None
    built_dtypes: Sequence[str] | None = None
    keeps_forms: bool | None = None
    has_thread: bool | None = None
    adapter_rank: int | None = None
    adapter_changes: Collection[str] | None = None
    draws_masked: bool | None = None
    scores_masked: bool | None = None
    scores_more: bool | None = None
    num_embedded: int | None = None
    num_images: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of the table.

    settings: what it is about, as a caller writes it. holds: what must be true, a sentence. facts:
    names of the Facts that it needs, in the order in which `refusal` takes them. refusal: returns
    the message of the error, None where the rule holds. error: the type that is raised.
    """

    name: str
    settings: tuple[str, ...]
    holds: str
    facts: tuple[str, ...]
    refusal: Callable[..., str | None]
    error: type[JpagedError]


RULES: list[Rule] = []


def check_combination(facts: Facts) -> None:
    """Raise the error of the first rule that these facts break; its `rule` is the rule's name."""
    for rule in RULES:
        values = [getattr(facts, name) for name in rule.facts]
        if all(value is not None for value in values) and (message := rule.refusal(*values)):
            error = rule.error(message)
            error.rule = rule.name
            raise error


def as_markdown() -> str:
    """Return the text of docs/combinations.md."""
    rows = [
        f"| {rule.name} | {', '.join(f'`{s}`' for s in rule.settings)} "
        f"| {rule.holds} | {rule.error.__name__} |"
        for rule in RULES
    ]
    return PAGE + "\n".join(rows) + "\n"


PAGE = """# What goes with what

Settings that are not named together here go together. A combination that breaks a rule is refused
before anything runs: the error names the values and what to change, and its attribute `rule` is the
name in the first column. `tests/test_combinations.py` builds all pairs of settings on a tiny model:
each is accepted, or refused by one of these rules and by nothing else. A slow test there serves the
pairs that are accepted and compares their tokens with the plain engine's.

This page is printed from `jpaged/combinations.py` by `python scripts/print_combinations.py`.

| rule | settings | what must hold | error |
|---|---|---|---|
"""


def _rule(*settings: str, error: type[JpagedError] = ConfigError) -> Callable[..., Any]:
    """Add a function to the table; settings: what the rule is about."""

    def add(refusal: Callable[..., str | None]) -> Callable[..., str | None]:
        RULES.append(
            Rule(
                name=refusal.__name__,
                settings=settings,
                holds=" ".join((refusal.__doc__ or "").split()),
                facts=tuple(inspect.signature(refusal).parameters),
                refusal=refusal,
                error=error,
            )
        )
        return refusal

    return add


# Sizes


@_rule("token_buckets", "max_num_batched_tokens")
def token_buckets_hold_a_step(config: EngineConfig) -> str | None:
    """The largest of `token_buckets` is at least `max_num_batched_tokens`."""
    sizes, most = config.token_buckets, config.max_num_batched_tokens
    if sizes and sizes[-1] < most:
        return f"token_buckets={sizes} end below max_num_batched_tokens={most}"
    return None


@_rule("seq_buckets", "max_num_seqs")
def seq_buckets_hold_all_rows(config: EngineConfig) -> str | None:
    """The largest of `seq_buckets` is at least `max_num_seqs`."""
    sizes, most = config.seq_buckets, config.max_num_seqs
    if sizes and most is not None and sizes[-1] < most:
        return f"seq_buckets={sizes} end below max_num_seqs={most}"
    return None


@_rule("max_model_len", "model")
def context_within_the_positions(config: EngineConfig, model: ModelConfig) -> str | None:
    """`max_model_len` is at most the model's max_position_embeddings."""
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        return (
            f"max_model_len={config.max_model_len}: the model has max_position_embeddings={longest}"
        )
    return None


# Steps


@_rule("decode_steps", "deterministic")
def pinned_steps_draw_one_token(config: EngineConfig, is_batch_invariant: bool) -> str | None:
    """Where `deterministic=True` needs steps of one size (products or attention compute a row
    differently in other batches), `decode_steps` is 1.
    """
    if config.deterministic and not is_batch_invariant and config.decode_steps not in (None, 1):
        return (
            f"decode_steps={config.decode_steps}: deterministic=True draws one token a dispatch "
            "here"
        )
    return None


@_rule("deterministic", "model", error=UnsupportedError)
def deterministic_states_are_stepped(config: EngineConfig, states_are_alike: bool) -> str | None:
    """`deterministic=True` takes a model without Mamba-2 and without the gated delta rule, or with
    their C++ kernels for CPUs: XLA computes tokens of both in chunks, whose bits depend on where a
    step begins.
    """
    if config.deterministic and not states_are_alike:
        return (
            "deterministic=True: the states of this model (of the gated delta rule or of Mamba-2) "
            "are computed in chunks here, whose bits depend on where a step begins; their C++ "
            "kernels for CPUs step token by token"
        )
    return None


@_rule("logprobs(exact=)", "deterministic", error=UnsupportedError)
def exact_forwards_have_the_bits_of_serving(no_exact: str) -> str | None:
    """`logprobs(exact=True)` takes plain weights, in bf16 or with a `dtype` of bfloat16, on one CPU
    with the C++ kernels, where `deterministic` serving needs no steps of one size.
    """
    return f"exact=True: {no_exact}" if no_exact else None


@_rule("stream_steps", "decode_steps")
def streams_draw_no_more_at_once(config: EngineConfig) -> str | None:
    """`stream_steps` is at most `decode_steps`, for which steps are compiled."""
    if (config.stream_steps or 1) > (config.decode_steps or 1):
        return f"stream_steps={config.stream_steps} is above decode_steps={config.decode_steps}"
    return None


@_rule("separate_draw", "decode_steps")
def several_steps_draw_themselves(config: EngineConfig) -> str | None:
    """`separate_draw=True` takes `decode_steps=1`: a dispatch of several steps draws in between."""
    if config.separate_draw and (config.decode_steps or 1) > 1:
        return f"separate_draw=True: a dispatch of decode_steps={config.decode_steps} draws too"
    return None


@_rule("strict", "structured_output", "SamplingParams.structured", error=RequestError)
def strict_draws_under_masks(config: EngineConfig, draws_masked: bool) -> str | None:
    """With `strict=True`, requests for a given form need `structured_output=True`, which compiles
    draws under masks.
    """
    if draws_masked and config.strict and not config.structured_output:
        return (
            "structured: strict=True compiled no draws under masks: pass structured_output=True as "
            "well"
        )
    return None


@_rule("strict", "score(structured=)", error=RequestError)
def strict_scores_without_masks(config: EngineConfig, scores_masked: bool) -> str | None:
    """With `strict=True`, `score` takes no `structured=`: no table has steps that score under
    masks.
    """
    if scores_masked and config.strict:
        return "structured: strict=True has no steps that score under masks"
    return None


@_rule("strict", "score(top_k=, at=, entropy=)", "hidden", error=RequestError)
def strict_scores_nothing_more(config: EngineConfig, scores_more: bool) -> str | None:
    """With `strict=True`, `score` takes no `top_k=`, `at=` and `entropy=`, and there is no
    `hidden`: no table has their steps.
    """
    if scores_more and config.strict:
        return "strict=True has no steps for top_k, at, entropy and hidden: score by another engine"
    return None


# Kernels and numbers


@_rule("attention", "kv_cache_dtype", "block_size", "model", error=UnsupportedError)
def named_kernel_can_run(config: EngineConfig, no_kernel: str) -> str | None:
    """A kernel that `attention` names can run on this device with the model's heads, `block_size`
    and `kv_cache_dtype`.
    """
    if no_kernel and config.attention != "auto":
        return f"attention={config.attention!r} cannot run: {no_kernel}; 'auto' takes what can"
    return None


@_rule("quantized_activations", "dtype", error=UnsupportedError)
def integer_activations_need_cpu_products(activations: str, no_cpu_products: str) -> str | None:
    """`quantized_activations` of "int8" and "int16" need the C++ products of CPUs: weights in
    bfloat16, on a CPU, with a compiler.
    """
    if no_cpu_products and activations not in ("auto", "plain"):
        return (
            f"quantized_activations={activations!r}: only the C++ products of CPUs have it, which "
            f"cannot run here ({no_cpu_products}); 'plain' runs everywhere"
        )
    return None


@_rule("quantization", "tensor_parallel_size", "model")
def weights_split_into_whole_groups(
    served_form: str, weight: str, inputs: int, group: int
) -> str | None:
    """With `quantization="int4"`, a device has whole groups of 32 inputs of each weight."""
    if inputs % group:
        return (
            f"quantization={served_form!r}: {weight} has {inputs} inputs on a device in a row of "
            f"its last axis, which are not whole groups of {group}"
        )
    return None


@_rule("quantization", "load_params(dequantize=)")
def quantized_weights_keep_their_form(weight: str, form: str, served_form: str) -> str | None:
    """Weights that were loaded in 8 or 4 bits are served in their own form: `quantization` is that
    form or None.
    """
    if form != served_form:
        return (
            f"{weight} is in {form} already, quantization= asks for {served_form}: leave it out, "
            "or load_params(..., dequantize=True)"
        )
    return None


@_rule("tensor_parallel_size", "load_params(dequantize=)")
def quantized_weights_split_as_they_are(weight: str, form: str, is_rearranged: bool) -> str | None:
    """Weights that were loaded in 8 or 4 bits are split over so few devices that no KV head is
    repeated and no vocabulary is padded.
    """
    if is_rearranged:
        return (
            f"{weight} in {form}: on so many devices KV heads would be repeated or the vocabulary "
            "padded, which weights that are not plain cannot be; take fewer, or load_params(..., "
            "dequantize=True)"
        )
    return None


@_rule("tensor_parallel_size", "load_params(dequantize=...)")
def quantized_weights_split_evenly(weight: str, form: str, uneven_split: str) -> str | None:
    """The devices that share the model divide values and scales of weights in 8 or 4 bits."""
    if uneven_split:
        return (
            f"{weight} in {form}: {uneven_split}: fewer devices, or load_params(..., "
            "dequantize=True)"
        )
    return None


@_rule("dtype", "load_params")
def weights_of_products_have_one_dtype(linear_dtypes: Collection[str]) -> str | None:
    """The weights of products are of one dtype, or `dtype` makes them so."""
    if len(linear_dtypes) > 1:
        return f"linear weights in {_names(linear_dtypes)}: pass dtype= to serve them in one"
    return None


@_rule("dtype", "update_params")
def new_weights_keep_their_dtypes(dtypes: Sequence[str], built_dtypes: Sequence[str]) -> str | None:
    """Weights that take the place of others have their dtypes, or `dtype` gives them."""
    if dtypes != built_dtypes:
        built = f"this engine was built for {_names(built_dtypes)}"
        return f"params in {_names(dtypes)}; {built}: pass dtype= to it"
    return None


@_rule("quantization", "load_params(dequantize=...)", "update_params")
def new_weights_keep_their_forms(keeps_forms: bool) -> str | None:
    """Weights that take the place of others lie in the same forms, or `quantization` makes them."""
    if not keeps_forms:
        return (
            "params whose weights lie in other forms than those that this engine was built for: "
            "pass quantization= to it, or load them with dequantize=True"
        )
    return None


def _names(dtypes: Collection[str]) -> str:
    return " and ".join(sorted(set(dtypes)))


# Devices


@_rule("tensor_parallel_size", "data_parallel_size")
def devices_are_enough(config: EngineConfig, available: int) -> str | None:
    """`tensor_parallel_size` times `data_parallel_size` is at most the number of devices."""
    asked = {
        "data_parallel_size": config.data_parallel_size or 1,
        "tensor_parallel_size": config.tensor_parallel_size or 1,
    }
    if asked["data_parallel_size"] * asked["tensor_parallel_size"] > available:
        named = ", ".join(f"{name}={size}" for name, size in asked.items() if size > 1)
        return f"{named}: there are {available} devices"
    return None


@_rule("tensor_axis", "mesh")
def tensor_axis_is_of_the_mesh(config: EngineConfig, mesh_axes: tuple[str, ...]) -> str | None:
    """`tensor_axis` names axes of the mesh."""
    axis = config.tensor_axis
    named = () if axis in (None, "auto") else (axis,) if isinstance(axis, str) else axis
    if unknown := [name for name in named if name not in mesh_axes]:
        return f"tensor_axis={axis!r}: {unknown[0]!r} is not an axis of the mesh {mesh_axes}"
    return None


@_rule("tensor_parallel_size", "mesh")
def tensor_size_is_that_of_the_mesh(config: EngineConfig, devices: int) -> str | None:
    """`tensor_parallel_size` beside a mesh is the number of devices along its tensor axis."""
    if (size := config.tensor_parallel_size) not in (None, devices):
        return (
            f"tensor_parallel_size={size}: {devices} devices of the mesh share the model; pass one "
            "of the two"
        )
    return None


@_rule("data_parallel_size", "mesh")
def replicas_are_those_of_the_mesh(config: EngineConfig, replicas: int) -> str | None:
    """`data_parallel_size` beside a mesh is the number of devices along its other axes."""
    if (size := config.data_parallel_size) not in (None, replicas):
        return f"data_parallel_size={size}: the mesh has {replicas} replicas; pass one of the two"
    return None


@_rule("expert_parallel", "mesh")
def experts_have_devices(config: EngineConfig, holders: int) -> str | None:
    """`expert_parallel=True` takes several devices."""
    if config.expert_parallel and holders == 1:
        return (
            "expert_parallel=True: there is one device; pass a mesh, tensor_parallel_size or "
            "data_parallel_size"
        )
    return None


@_rule("expert_parallel", "model")
def experts_are_there(config: EngineConfig, has_experts: bool) -> str | None:
    """`expert_parallel=True` takes a model with a mixture of experts."""
    if config.expert_parallel and not has_experts:
        return "expert_parallel=True: the model has no mixture of experts"
    return None


@_rule("expert_parallel", "mesh", "model")
def experts_divide(num_experts: int, holders: int) -> str | None:
    """`expert_parallel=True` takes a number of experts that divides by that of the devices."""
    if num_experts % holders:
        return (
            f"expert_parallel=True: {num_experts} experts do not divide over {holders} devices; "
            "choose tensor_parallel_size and data_parallel_size so that they do"
        )
    return None


@_rule("expert_parallel", "lora_extra", "data_parallel_size")
def adapters_of_experts_stay(config: EngineConfig, replicas: int) -> str | None:
    """`expert_parallel=True` over several replicas takes no adapters of experts: each replica has
    tables of its own.
    """
    if config.expert_parallel and replicas > 1 and "experts" in config.lora_extra:
        return (
            "expert_parallel=True: lora_extra has 'experts', whose adapters no other replica has; "
            "leave one of the two out, or serve a single replica"
        )
    return None


@_rule("routed_experts", "model", error=UnsupportedError)
def choices_are_alike(taken_experts: tuple[int, ...]) -> str | None:
    """`routed_experts=True`, and `routed=` of a trainer, take a model with mixtures of experts, of
    which a token takes as many in one layer as in another.
    """
    if not taken_experts:
        return "routed_experts: the model has no mixture of experts"
    if len(set(taken_experts)) > 1:
        return f"routed_experts: layers take unequal numbers of experts a token: {taken_experts}"
    return None


@_rule("tensor_parallel_size", "mesh", "model")
def heads_split_over_the_devices(heads: tuple[int, int], devices: int) -> str | None:
    """The devices that share the model divide its KV heads, or are a multiple of them that divides
    its query heads.
    """
    num_heads, num_kv_heads = heads
    if num_kv_heads % devices and (devices % num_kv_heads or num_heads % devices):
        return (
            f"num_heads={num_heads} and num_kv_heads={num_kv_heads} do not split over {devices} "
            "devices: take a number that divides one and is divided by or divides the other"
        )
    return None


# Guesses


@_rule("speculative.method", "speculative.model")
def ngram_takes_no_model(speculative: Speculative) -> str | None:
    """`speculative` names a model with `method="draft"`, `method="eagle"` and `method="mtp"`
    only.
    """
    if speculative.model is not None and not speculative.has_model:
        return (
            f"speculative: model={speculative.model!r}: only with method='draft', 'eagle' or 'mtp'"
        )
    return None


@_rule("num_states", "model")
def states_are_of_models_that_keep_them(config: EngineConfig, has_state: bool) -> str | None:
    """`num_states` takes a model that keeps a state a sequence, or one that guesses for it and
    does.
    """
    if config.num_states is not None and not has_state:
        return f"num_states={config.num_states}: this model keeps no state a sequence"
    return None


@_rule("submit", "as_completed", "rollout", "AsyncLLM", "processes")
def threads_of_an_engine_step_in_one_process(processes: int, has_thread: bool) -> str | None:
    """A model over several processes has no thread that steps by itself: its steps would differ
    from those of the other processes; `generate` runs there, called in each process alike.
    """
    if processes > 1 and has_thread:
        return (
            f"submit, as_completed, rollout and AsyncLLM over {processes} processes: their thread "
            "would step at other moments than those of the other processes; call generate in each"
        )
    return None


@_rule("prefix_store", "processes")
def files_are_read_in_one_process(config: EngineConfig, processes: int) -> str | None:
    """`prefix_store` takes a model in one process: several would have to find the same files at the
    same moment.
    """
    if processes > 1 and config.prefix_store is not None:
        return f"prefix_store={config.prefix_store!r} over {processes} processes"
    return None


@_rule("prefix_store", "enable_prefix_caching")
def files_are_for_others_to_find(config: EngineConfig) -> str | None:
    """`prefix_store` takes `enable_prefix_caching=True`: without it nothing is found that another
    request has computed.
    """
    if config.prefix_store is not None and not config.enable_prefix_caching:
        return f"prefix_store={config.prefix_store!r}: enable_prefix_caching is off"
    return None


@_rule("prefix_store_policy", "prefix_store")
def a_policy_is_of_a_store(config: EngineConfig) -> str | None:
    """`prefix_store_policy="write_through"` takes a `prefix_store`: without it there is nowhere to
    write to.
    """
    if config.prefix_store is None and config.prefix_store_policy != "write_back":
        return f"prefix_store_policy={config.prefix_store_policy!r}: prefix_store is None"
    return None


@_rule("speculative.adaptive", "processes")
def guesses_over_processes_are_not_adaptive(config: EngineConfig, processes: int) -> str | None:
    """A model over several processes takes `"adaptive": False`: adaptive guessing goes by clocks,
    which differ.
    """
    if processes > 1 and config.speculative is not None and config.speculative.adaptive:
        return "speculative over several processes: pass 'adaptive': False"
    return None


@_rule("speculative.model", "draft", "tensor_parallel_size")
def hidden_states_of_heads_split(draft: ModelConfig, devices: int) -> str | None:
    """The devices that share a model divide the hidden_size of a head that guesses for it, since
    each stores a share of the hidden states.
    """
    if draft.is_head and draft.hidden_size % devices:
        return (
            f"{draft.draft_head.title} of hidden_size={draft.hidden_size}: does not divide over "
            f"{devices} devices that share the model"
        )
    return None


@_rule("draft", "speculative.method")
def draft_weights_need_a_method(config: EngineConfig, has_draft_weights: bool) -> str | None:
    """`generate(draft=...)` takes `speculative` with `method="draft"`, `method="eagle"` or
    `method="mtp"`.
    """
    if has_draft_weights and not (config.speculative and config.speculative.has_model):
        return "draft weights need speculative={'method': 'draft', 'eagle' or 'mtp'}"
    return None


@_rule("speculative.method", "speculative.model", "draft")
def draft_methods_need_a_model(config: EngineConfig, has_draft_weights: bool) -> str | None:
    """`method="draft"` and `method="eagle"` come with a folder or with weights; so does
    `method="mtp"` where the model's own weights did not come from a folder.
    """
    asked = config.speculative
    if asked and asked.has_model and asked.model is None and not has_draft_weights:
        return (
            f"speculative: method={asked.method!r} needs a model: a folder, or weights as "
            "LLM(speculative={'model': ...}) or generate(draft=...)"
        )
    return None


@_rule("speculative.method", "speculative.model", "draft", error=UnsupportedError)
def eagle_takes_a_head(config: EngineConfig, draft: ModelConfig) -> str | None:
    """`method="eagle"` takes an EAGLE-3 head."""
    asked = config.speculative
    if asked and asked.method == "eagle" and not _is(draft, "EAGLE-3 head"):
        return (
            f"speculative: method='eagle': {asked.model or 'weights'} of {draft.family} is no "
            "EAGLE-3 head; a model guesses with method='draft', an MTP head with 'mtp'"
        )
    return None


@_rule("speculative.method", "speculative.model", "draft", error=UnsupportedError)
def mtp_takes_an_mtp_head(config: EngineConfig, draft: ModelConfig) -> str | None:
    """`method="mtp"` takes an MTP head, as `load_params(FOLDER, mtp=True)` reads it."""
    asked = config.speculative
    if asked and asked.method == "mtp" and not _is(draft, "MTP head"):
        return (
            f"speculative: method='mtp': {asked.model or 'weights'} of {draft.family} is no MTP "
            "head: load_params(FOLDER, mtp=True) reads one"
        )
    return None


def _is(config: ModelConfig, title: str) -> bool:
    return config.draft_head is not None and config.draft_head.title == title


@_rule("speculative.method", "speculative.model", "draft")
def draft_takes_a_model(config: EngineConfig, draft: ModelConfig) -> str | None:
    """`method="draft"` takes a model that is no head."""
    asked = config.speculative
    if asked and asked.method == "draft" and draft.is_head:
        title, method = draft.draft_head.title, "mtp" if _is(draft, "MTP head") else "eagle"
        return (
            f"speculative: method='draft': {asked.model or 'weights'} is an {title}: use {method!r}"
        )
    return None


@_rule("speculative.model", "draft", "model")
def drafts_share_the_vocabulary(draft: ModelConfig, model: ModelConfig) -> str | None:
    """A draft model, and a head, are of the vocabulary of the model that they guess for."""
    if draft.vocab_size == model.vocab_size:
        return None
    if draft.is_head:
        title = draft.draft_head.title
        return f"{title} for vocab_size={draft.vocab_size}: the model has {model.vocab_size}"
    return (
        f"draft model: vocab_size={draft.vocab_size}, the model has {model.vocab_size}: a draft "
        "needs the very same vocabulary"
    )


@_rule("max_model_len", "speculative.model", "draft")
def drafts_reach_as_far_as_the_model(config: EngineConfig, draft: ModelConfig) -> str | None:
    """A draft model's max_position_embeddings is at least `max_model_len`."""
    most, longest = config.max_model_len, draft.max_position_embeddings
    if not draft.is_head and most is not None and longest < most:
        return (
            f"draft model: max_position_embeddings={longest} is below max_model_len={most}: lower "
            "max_model_len"
        )
    return None


@_rule("model")
def models_are_no_heads(model: ModelConfig) -> str | None:
    """A head is passed in `speculative`, not as the model."""
    if model.is_head:
        title, method = model.draft_head.title, "mtp" if _is(model, "MTP head") else "eagle"
        return (
            f"an {title} is no model: pass it as speculative={{'method': {method!r}, "
            "'model': ...} of the model that it guesses for"
        )
    return None


@_rule("speculative.model", "draft", "model")
def heads_fit_the_hidden_size(draft: ModelConfig, model: ModelConfig) -> str | None:
    """A head's target_hidden_size is the model's hidden_size; so is its own where it borrows the
    model's embedding or output head.
    """
    head = draft.draft_head
    if head is None:
        return None
    if head.target_hidden_size != model.hidden_size:
        return (
            f"{head.title} for target_hidden_size={head.target_hidden_size}: the model has "
            f"hidden_size={model.hidden_size}"
        )
    borrows = not (head.has_embed and head.has_lm_head)
    if borrows and draft.hidden_size != model.hidden_size:
        return (
            f"{head.title} of hidden_size={draft.hidden_size} without an embedding or a head of "
            f"its own: those of the model are of hidden_size={model.hidden_size}"
        )
    return None


@_rule("speculative.method", "model", error=UnsupportedError)
def heads_read_plain_embeddings(draft: ModelConfig, model: ModelConfig) -> str | None:
    """The model that a head guesses for does not scale its embeddings."""
    if draft.is_head and model.embedding_scale != 1.0:
        title = draft.draft_head.title
        return f"an {title} for {model.family}, which scales its embeddings: use 'draft'"
    return None


@_rule("speculative.method", "max_embeddings", "images", error=UnsupportedError)
def guesses_of_models_read_tokens(config: EngineConfig) -> str | None:
    """`max_embeddings` above 0, and `images`, take no `speculative`, or `method="ngram"`: a model
    that guesses, and a head, read tokens alone.
    """
    asked = config.speculative
    if (config.max_embeddings or config.images) and asked is not None and asked.has_model:
        return (
            f"max_embeddings={config.max_embeddings}, images={config.images}: speculative with "
            f"method={asked.method!r} reads tokens alone; 'ngram' goes with embeddings, or pass "
            "max_embeddings=0 and images=False"
        )
    return None


@_rule("max_embeddings", "embeddings", error=RequestError)
def embeddings_need_a_pool(config: EngineConfig, num_embedded: int) -> str | None:
    """Prompts with `embeddings` take an engine with `max_embeddings` of at least 1."""
    if num_embedded and not config.max_embeddings:
        return (
            f"{num_embedded} embeddings in place of tokens: max_embeddings=0; pass max_embeddings= "
            "of EngineConfig, the rows of a pool that a prefill step takes at most"
        )
    return None


@_rule("images", "model")
def images_need_a_tower(config: EngineConfig, model: ModelConfig) -> str | None:
    """`images` takes a model with a vision tower: the folder of one, or params that
    `load_params(FOLDER, images=True)` has read.
    """
    if config.images and model.vision is None:
        return (
            f"images=True: these params of {model.family} have no vision tower; pass a folder that "
            "has one, or params of load_params(FOLDER, images=True)"
        )
    return None


@_rule("images", error=RequestError)
def images_need_the_setting(config: EngineConfig, num_images: int) -> str | None:
    """Prompts with images or videos take an engine with `images`."""
    if num_images and not config.images:
        return (
            f"{num_images} images or videos in a prompt: images=False; pass images=True of "
            "EngineConfig"
        )
    return None


# Adapters


@_rule("max_loras", "lora")
def adapters_need_slots(config: EngineConfig, adapter_rank: int) -> str | None:
    """An LLM that is to take adapters has `max_loras` of at least 1."""
    if not config.max_loras:
        return "max_loras=0: pass max_loras=, the adapters of a step at most"
    return None


@_rule("max_lora_rank", "lora")
def adapters_fit_the_rank(config: EngineConfig, adapter_rank: int) -> str | None:
    """An adapter's rank is at most `max_lora_rank`."""
    if adapter_rank > (most := config.max_lora_rank):
        return f"an adapter of rank {adapter_rank} is above max_lora_rank={most}"
    return None


@_rule("lora_extra", "lora")
def adapters_change_what_has_tables(
    config: EngineConfig, adapter_changes: Collection[str]
) -> str | None:
    """`lora_extra` names what an adapter changes beside attention and MLP."""
    if missing := set(adapter_changes) - set(config.lora_extra):
        wanted = tuple(sorted({*config.lora_extra, *missing}))
        return (
            f"lora_extra={config.lora_extra}: the adapter changes the {min(missing)}; pass "
            f"lora_extra={wanted} to have tables for it"
        )
    return None
