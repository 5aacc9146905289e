"""EngineConfig: how to serve a model; frozen, resolved once, never mutated. A setting is described
here alone: command lines, LLM's arguments and resumed batch runs read it here.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, get_args

from jpaged.checks import at_least, parsed_settings, settings_of, store_address
from jpaged.combinations import Facts, check_combination
from jpaged.errors import ConfigError, UnsupportedError
from jpaged.images.limits import ImageLimits
from kernels_pallas.paged_attention import IMPLEMENTATIONS, Name

if TYPE_CHECKING:  # which stands on jax, as this module must not
    from jpaged.models.config import ModelConfig

# Forms that plain weights can be made into: those of models.quantized.FORMS that have `encode`.
Quantization = Literal["int8", "int4", "fp8"]
StorePolicy = Literal["write_back", "write_through"]
ATTENTION = ("auto", *IMPLEMENTATIONS)
QUANTIZED_ACTIVATIONS = ("auto", "plain", "int8", "int16")
LORA_EXTRA = ("embedding", "head", "experts")
CHOICES = {  # of fields that may be None
    "dtype": ("float32", "bfloat16", "float16"),
    "quantization": get_args(Quantization),
    "kv_cache_dtype": ("int8", "fp8"),
}
BATCHED, CPU_BATCHED = 8192, 1024  # what max_num_batched_tokens is where nobody chose it
CPU_STEPS = 4  # what decode_steps is there; 8 have been slower (docs/speed.md)
ROWS = 256  # what max_num_seqs is where nobody chose it
SPECULATIVE = (
    'guess tokens ahead and check them in one step, with equal outputs: {"method": "ngram", '
    '"num_tokens": 8}, by a smaller model: {"method": "draft", "model": FOLDER}, by an EAGLE-3 '
    'head: {"method": "eagle", "model": FOLDER}, or by the head that the model\'s own files have: '
    '{"method": "mtp"}'
)

IMAGE_LIMITS = (
    'what an image may be and where it may come from, as {"max_pixels": 4000000, "local_paths": '
    'false, "hosts": ["images.example.com"]}; None: 32 MiB, 40 million pixels, paths of this '
    "machine and no URL"
)


# The fields of EngineConfig by what they decide, in the order in which --help shows them.
Group = Literal[
    "batch and memory",
    "numbers",
    "what requests may ask for",
    "adapters",
    "steps and their shapes",
    "devices and processes",
]
# Why answers do not depend on a setting.
SAME_TOKENS = "decides which rows and tokens share a step; tokens are those of any other batch"
OTHER_DEVICES = "decides which devices compute; sums are added in another order"
POOL = "sizes the KV pool; a prompt that does not fit is an error line, see --retry-failed"
TABLES = "sizes the tables of adapters; one that does not fit ends the run before its first line"
KEPT_OR_COMPUTED = "decides whether KV is kept or computed again; the values are the same"


def _knob[T](default: T, group: Group, help: str, *, same_answers: str | None = None) -> T:
    """Return a field of EngineConfig. help: what it is, which command lines show as well.
    same_answers: why no answer depends on it; None where one may, and a batch run is resumed only
    under the value that it began with.
    """
    metadata = {"help": help, "group": group, "same_answers": same_answers}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculative:
    """How rows guess tokens ahead, which one step then checks: outputs are those without.

    method: "ngram" looks a row's last tokens up in its own text, "draft" asks a smaller model of
    the same vocabulary, "eagle" an EAGLE-3 head of this model, "mtp" the head that the model's own
    files have. num_tokens: guessed at most.
    adaptive: only where it saves time, by what was measured. model: the folder of a draft model or
    head, None where its weights are passed (LLM takes them in its place, generate as draft=); with
    "mtp" None is the folder of the model.
    """

    method: Literal["ngram", "draft", "eagle", "mtp"] = "ngram"
    num_tokens: int = 8
    adaptive: bool = True
    model: str | None = None

    def __post_init__(self) -> None:
        at_least(1, self, "num_tokens")
        built = "'ngram', 'draft', 'eagle' or 'mtp'"
        if self.method == "medusa":
            raise UnsupportedError(f"speculative: method='medusa' is not built: use {built}")
        if self.method not in ("ngram", "draft", "eagle", "mtp"):
            raise ConfigError(f"speculative: method={self.method!r}: must be {built}")
        if isinstance(self.model, Path):
            object.__setattr__(self, "model", str(self.model))
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(
                f"speculative: model of type {type(self.model).__name__}: a config takes a folder; "
                "pass weights to LLM(speculative=...) or generate(draft=...)"
            )
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative: adaptive={self.adaptive!r}: must be True or False")
        check_combination(Facts(speculative=self))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a flag: a dict of the fields as JSON, or "none"."""
        return parsed_settings(cls, "speculative", text)

    @classmethod
    def of(cls, value: object) -> Self:
        """Make one of a dict of its fields."""
        return settings_of(cls, "speculative", value)

    @property
    def has_model(self) -> bool:
        """Whether a model drafts."""
        return self.method != "ngram"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to serve. None means "chosen for the model and the machine"; `resolve` fills it in
    once.
    """

    max_model_len: int | None = _knob(
        None,
        "batch and memory",
        "tokens of prompt and completion together; None: max_position_embeddings",
    )
    max_num_seqs: int | None = _knob(
        ROWS,
        "batch and memory",
        "rows that run at once, of each replica; of a model that keeps a state a sequence no more "
        "than there are states for, which a warning says; None is as many of 1024 (on CPUs 256) as "
        "memory holds states for, and 256 where a model keeps none",
        same_answers=SAME_TOKENS,
    )
    max_num_batched_tokens: int = _knob(
        BATCHED,
        "batch and memory",
        "prefill tokens a step; default on a CPU: 1024",
        same_answers=SAME_TOKENS,
    )
    block_size: int = _knob(
        64,
        "batch and memory",
        "P, tokens a KV block",
        same_answers=POOL,
    )
    num_blocks: int | None = _knob(
        None,
        "batch and memory",
        "N, KV blocks of a replica, of the layers that reach furthest back; those with a window "
        "have a share of them; None sizes the pool from memory",
        same_answers=POOL,
    )
    num_states: int | None = _knob(
        None,
        "batch and memory",
        "of a model that keeps a state a sequence: states in a replica's pool, those that are kept "
        "to be found again among them; None is a few a row of max_num_seqs, as far as memory holds "
        "them beside as many bytes of keys and values",
        same_answers=POOL,
    )
    memory_utilization: float = _knob(
        0.9,
        "batch and memory",
        "share of an accelerator's memory, for weights, temporaries and pool together",
        same_answers=POOL,
    )
    enable_prefix_caching: bool = _knob(
        True,
        "batch and memory",
        "compute equal beginnings of prompts once",
        same_answers=SAME_TOKENS,
    )
    max_n: int = _knob(
        256,
        "what requests may ask for",
        "samples that one request may ask for",
    )
    swap_space_gib: float = _knob(
        0.0,
        "batch and memory",
        "host memory for KV that the pool gives up, of evicted prefixes and preempted sequences, "
        "GiB; 0 computes it again instead",
        same_answers=KEPT_OR_COMPUTED,
    )
    swap_min_tokens: int = _knob(
        64,
        "batch and memory",
        "fewer tokens than this are computed again rather than loaded from host memory or files; "
        "with a prefix_store also what is sooner computed than loaded, unless this is 0",
        same_answers=KEPT_OR_COMPUTED,
    )
    prefix_store: str | None = _knob(
        None,
        "batch and memory",
        "a folder for KV that outlives the process: what the pool gives up, and what is used "
        "twice, is found there by later processes with the same weights; several may share one; "
        "or tcp://HOST:PORT of a `jpaged store`, for several machines",
        same_answers=KEPT_OR_COMPUTED,
    )
    prefix_store_policy: Literal[StorePolicy] = _knob(
        "write_back",
        "batch and memory",
        "write_back writes what the pool gives up and what is used twice to prefix_store; "
        "write_through every block once it is full, and a request ends when its blocks are there: "
        "for an engine that computes prompts for others",
        same_answers=KEPT_OR_COMPUTED,
    )
    prefix_store_gib: float = _knob(
        16.0,
        "batch and memory",
        "files of prefix_store at most, those of all processes together, GiB; what was used least "
        "recently goes first; a block server has a bound of its own",
        same_answers=KEPT_OR_COMPUTED,
    )
    dtype: str | None = _knob(
        None,
        "numbers",
        "float32, bfloat16 or float16, one cast a weight version; None keeps the params' own",
    )
    quantization: Literal[Quantization] | None = _knob(
        None,
        "numbers",
        "weights served in 8 or 4 bits: int8 or fp8 with a scale an output, int4 with one for 32 "
        "inputs (its head in int8); made of the params once a weight version",
    )
    quantized_activations: Literal["auto", "plain", "int8", "int16"] = _knob(
        "auto",
        "numbers",
        "what x becomes in products with int8 and int4 weights, the same on every processor: plain "
        "leaves it as it is, int8 and int16 (bfloat16 on CPUs) make integers of it; auto takes "
        "what the processor is fastest with, which stats() names",
    )
    max_loras: int = _knob(
        0,
        "adapters",
        "adapters that a step can have: slots of its tables; 0 is none",
        same_answers=TABLES,
    )
    max_lora_rank: int = _knob(
        16,
        "adapters",
        "the largest rank of an adapter, which all are padded to",
        same_answers=TABLES,
    )
    lora_extra: tuple[Literal["embedding", "head", "experts"], ...] = _knob(
        (),
        "adapters",
        "what adapters may change beside attention and MLP; each has tables, which take memory",
        same_answers=TABLES,
    )
    kv_cache_dtype: Literal["int8", "fp8"] | None = _knob(
        None,
        "numbers",
        "keys and values kept in 8 bits, with a scale a token and head: about twice the blocks; "
        "None keeps them in the model's dtype",
    )
    attention: Literal["auto", Name] = _knob(
        "auto",
        "numbers",
        "the kernel: the fastest that can run here, or one by name, which then must",
    )
    token_buckets: tuple[int, ...] | None = _knob(
        None,
        "steps and their shapes",
        "padded token counts that steps are compiled for, ascending",
        same_answers=SAME_TOKENS,
    )
    seq_buckets: tuple[int, ...] | None = _knob(
        None,
        "steps and their shapes",
        "padded row counts that steps are compiled for, ascending",
        same_answers=SAME_TOKENS,
    )
    decode_steps: int | None = _knob(
        None,
        "steps and their shapes",
        "tokens of a row that one dispatch draws at most, in a loop on the device; None: 1, and on "
        "CPUs 4 where a program that draws several is compiled",
        same_answers="decides how often the host looks; the device draws the same tokens",
    )
    stream_steps: int | None = _knob(
        None,
        "steps and their shapes",
        "the same while a running request is streamed; None: decode_steps, or 1 where that is None",
        same_answers="decides how often the host looks; the device draws the same tokens",
    )
    separate_draw: bool | None = _knob(
        None,
        "steps and their shapes",
        "a decode is two programs, the model and a draw that prefills share: half of the compile "
        "time, one dispatch more a step; None: on CPUs, and no longer than the one program takes "
        "to compile beside it where it has the same bits",
        same_answers="compiles the model and the draw apart; they draw the same tokens",
    )
    max_logprobs: int = _knob(
        20,
        "what requests may ask for",
        "alternatives of a token that a request may ask for",
    )
    max_sampling_mask: int = _knob(
        0,
        "what requests may ask for",
        "tokens that the sampling mask of a draw has room for, which is the largest top_k of a "
        "request with sampling_mask; 0: no request may ask for one, and no step makes any",
    )
    max_embeddings: int = _knob(
        0,
        "what requests may ask for",
        "embeddings in place of tokens, as of images, that a prefill step takes at most: rows of "
        "their pool on the device; 0: no prompt may have any, and no step reads them, but with "
        "images=True it is max_num_batched_tokens",
    )
    images: bool = _knob(
        False,
        "what requests may ask for",
        "prompts may have images, which the vision tower of the model's files encodes; without it "
        "the text part alone is loaded",
    )
    max_image_tokens: int | None = _knob(
        None,
        "what requests may ask for",
        "tokens that an image takes at most: larger images are made smaller before they are "
        "encoded; None: as the files of the model say",
    )
    image_cache_gib: float = _knob(
        0.5,
        "batch and memory",
        "host memory for embeddings of images, so that one that is asked about again is not "
        "encoded again, GiB",
        same_answers=KEPT_OR_COMPUTED,
    )
    image_limits: ImageLimits | None = dataclasses.field(
        default=None,
        metadata={
            "help": IMAGE_LIMITS,
            "group": "what requests may ask for",
            "same_answers": "bounds images; one beyond is an error line, see --retry-failed",
        },
    )
    max_logit_bias: int = _knob(
        64,
        "what requests may ask for",
        "biased tokens that a request may have",
    )
    max_stop_ids: int = _knob(
        16,
        "what requests may ask for",
        "stop token ids that a request may have on the device",
    )
    strict: bool = _knob(
        False,
        "steps and their shapes",
        "compile the whole bucket table at start; a shape outside it is then an error",
    )
    structured_output: bool = _knob(
        False,
        "what requests may ask for",
        "draws under a mask are in the table of shapes, which warm-ups and `strict` compile; else "
        "they compile when first asked for, and `strict` refuses requests that need them",
    )
    deterministic: bool | None = _knob(
        None,
        "numbers",
        "bits depend on the request alone: nearly free where products and attention compute a row "
        "alike in any batch, and on there; elsewhere, if asked for, every step is of one size",
    )
    speculative: Speculative | None = dataclasses.field(
        default=None,
        metadata={
            "help": SPECULATIVE,
            "group": "steps and their shapes",
            "same_answers": "drafts are verified: tokens are those without them, whatever drafts",
        },
    )
    mixed: bool = _knob(
        False,
        "steps and their shapes",
        "rows that decode join the prefill steps, in place of waiting for them to end",
        same_answers=SAME_TOKENS,
    )
    tensor_parallel_size: int | None = _knob(
        None,
        "devices and processes",
        "devices that share the model; None: as the mesh or the params say, else one",
        same_answers=OTHER_DEVICES,
    )
    data_parallel_size: int | None = _knob(
        None,
        "devices and processes",
        "replicas of the model in one program, each with rows and a pool of its own; None: along "
        "every other axis of the mesh, else one",
        same_answers=OTHER_DEVICES,
    )
    tensor_axis: str | tuple[str, ...] | None = _knob(
        "auto",
        "devices and processes",
        "mesh axis, or axes as one, that heads, FFN and vocabulary are split over; auto takes the "
        "one that the params use",
        same_answers=OTHER_DEVICES,
    )
    routed_experts: bool = _knob(
        False,
        "what requests may ask for",
        "outputs say which experts of a mixture each token took; the cache holds that beside keys "
        "and values",
        same_answers="says more of the same tokens",
    )
    expert_parallel: bool | None = _knob(
        None,
        "devices and processes",
        "each device of the mesh has whole experts of a mixture, for the tokens of all replicas; "
        "False: a share of the width of every expert; None: that, or whole experts for a replica "
        "where the width does not divide over its devices",
        same_answers=OTHER_DEVICES,
    )
    peer_timeout_s: float = _knob(
        300.0,
        "devices and processes",
        "over several processes: seconds to wait for a step of theirs, compiles included",
        same_answers="decides when a silent process ends the run",
    )
    compilation_cache_dir: str | None = _knob(
        "auto",
        "steps and their shapes",
        "where compiled steps are kept between processes; auto is a folder of the user's cache "
        "unless jax was given one, None leaves jax's own setting",
        same_answers="keeps compiled steps between processes",
    )

    def __post_init__(self) -> None:
        at_least(1, self, "max_num_batched_tokens", "block_size")
        at_least(1, self, "max_logit_bias", "max_stop_ids", "max_n", "max_lora_rank")
        at_least(0, self, "max_logprobs", "max_sampling_mask", "max_embeddings")
        at_least(0, self, "swap_min_tokens", "max_loras")
        if self.speculative is not None:
            object.__setattr__(self, "speculative", Speculative.of(self.speculative))
        if self.image_limits is not None:
            object.__setattr__(self, "image_limits", ImageLimits.of(self.image_limits))
        chosen = ("max_model_len", "max_num_seqs", "num_blocks", "decode_steps", "max_image_tokens")
        chosen += ("stream_steps", "tensor_parallel_size", "data_parallel_size")
        if self.num_states is not None:  # a step reads one and writes the next
            at_least(2, self, "num_states")
        # Unless they are None.
        at_least(1, self, *(name for name in chosen if getattr(self, name) is not None))
        share, swap = self.memory_utilization, self.swap_space_gib
        if not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ConfigError(f"memory_utilization={share!r}: must be in (0, 1]")
        if not isinstance(swap, int | float) or not 0.0 <= swap < math.inf:
            raise ConfigError(f"swap_space_gib={swap!r}: must be a number of GiB of at least 0")
        kept = self.image_cache_gib
        if not isinstance(kept, int | float) or not 0.0 <= kept < math.inf:
            raise ConfigError(f"image_cache_gib={kept!r}: must be a number of GiB of at least 0")
        store, most = self.prefix_store, self.prefix_store_gib
        if isinstance(store, Path):
            object.__setattr__(self, "prefix_store", str(store))
        elif store is not None and (not isinstance(store, str) or not store):
            raise ConfigError(f"prefix_store={store!r}: must be the path of a folder, or None")
        elif store is not None:
            store_address(store)  # refuses what is neither
        if self.prefix_store_policy not in get_args(StorePolicy):
            raise ConfigError(
                f"prefix_store_policy={self.prefix_store_policy!r}: must be one of "
                f"{', '.join(get_args(StorePolicy))}"
            )
        if not isinstance(most, int | float) or not 0.0 < most < math.inf:
            raise ConfigError(f"prefix_store_gib={most!r}: must be a number of GiB above 0")
        if not isinstance(self.peer_timeout_s, int | float) or not self.peer_timeout_s > 0:
            raise ConfigError(f"peer_timeout_s={self.peer_timeout_s!r}: must be above 0")
        for name in ("token_buckets", "seq_buckets"):
            if (sizes := getattr(self, name)) is not None:
                if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                    raise ConfigError(f"{name}={sizes}: must be positive and strictly ascending")
                object.__setattr__(self, name, tuple(sizes))
        for name, values in CHOICES.items():
            if (value := getattr(self, name)) not in (None, *values):
                raise ConfigError(f"{name}={value!r}: must be {', '.join(values)} or None")
        object.__setattr__(self, "lora_extra", _lora_extra(self.lora_extra))
        if self.quantized_activations not in QUANTIZED_ACTIVATIONS:
            raise ConfigError(
                f"quantized_activations={self.quantized_activations!r}: must be one of "
                f"{', '.join(QUANTIZED_ACTIVATIONS)}"
            )
        if self.attention not in ATTENTION:
            raise ConfigError(
                f"attention={self.attention!r}: must be one of {', '.join(ATTENTION)}"
            )

    def resolve(
        self, model: "ModelConfig", *, batch_invariant: bool = False, on_cpu: bool = False
    ) -> Self:
        """Return the same settings with every size filled in for a model; num_blocks stays as it is
        (memory.py knows it), and max_num_seqs=None is ROWS (footprint.with_rows knows better).

        batch_invariant: what multiplies and attends computes a row alike in any batch. on_cpu:
        where steps run.
        """
        check_combination(Facts(config=self, model=model, is_batch_invariant=batch_invariant))
        longest = model.max_position_embeddings
        max_model_len = longest if self.max_model_len is None else self.max_model_len
        batched, seqs = self.max_num_batched_tokens, self.max_num_seqs or ROWS
        if on_cpu and batched == BATCHED and self.token_buckets is None:
            batched = CPU_BATCHED
        tokens = self.token_buckets or _up_to(batched, TOKEN_BUCKETS)
        is_single = seqs == 1 and not self.speculative  # a row that guesses draws several times
        rows = self.seq_buckets or ((1,) if is_single else _up_to(seqs, SEQ_BUCKETS))
        deterministic = batch_invariant if self.deterministic is None else self.deterministic
        if deterministic and not batch_invariant:
            tokens = rows = (PINNED,)
            batched, seqs = min(batched, PINNED), min(seqs, PINNED)
        separate = _separate_draw(self, on_cpu=on_cpu, alike=deterministic and batch_invariant)
        alike = batch_invariant or not deterministic
        at_once = on_cpu and alike and separate is not True and self.speculative is None
        return dataclasses.replace(
            self,
            max_model_len=max_model_len,
            max_num_batched_tokens=batched,
            max_num_seqs=seqs,
            token_buckets=tokens,
            seq_buckets=rows,
            decode_steps=self.decode_steps or (CPU_STEPS if at_once else 1),
            stream_steps=self.stream_steps or self.decode_steps or 1,
            separate_draw=separate,
            deterministic=deterministic,
            max_logprobs=min(self.max_logprobs, model.vocab_size),
            max_sampling_mask=min(self.max_sampling_mask, model.vocab_size),
            max_embeddings=self.max_embeddings or (batched if self.images else 0),
        )

    @property
    def pinned(self) -> bool:
        """Whether every step is of PINNED tokens and rows (resolved configs only)."""
        return bool(self.deterministic) and self.token_buckets == self.seq_buckets == (PINNED,)

    @property
    def num_rows(self) -> int:
        """Sequences that run at once in a replica (resolved configs only)."""
        assert self.max_num_seqs is not None
        return self.max_num_seqs

    @property
    def all_rows(self) -> int:
        """Sequences that run at once in all replicas that are asked for."""
        return (self.max_num_seqs or ROWS) * (self.data_parallel_size or 1)

    @property
    def max_blocks_per_seq(self) -> int:
        """M: blocks that a sequence of max_model_len tokens spans (resolved configs only)."""
        assert self.max_model_len is not None
        return -(-self.max_model_len // self.block_size)


class EngineFields(TypedDict, total=False):
    """For editors and type checkers; what each means and its default stands at EngineConfig."""

    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int | None
    num_states: int | None
    memory_utilization: float
    enable_prefix_caching: bool
    max_n: int
    swap_space_gib: float
    swap_min_tokens: int
    prefix_store: str | None
    prefix_store_policy: Literal[StorePolicy]
    prefix_store_gib: float
    dtype: str | None
    quantization: Quantization | None
    quantized_activations: Literal["auto", "plain", "int8", "int16"]
    max_loras: int
    max_lora_rank: int
    lora_extra: tuple[Literal["embedding", "head", "experts"], ...]
    kv_cache_dtype: Literal["int8", "fp8"] | None
    attention: Literal["auto", Name]
    token_buckets: tuple[int, ...] | None
    seq_buckets: tuple[int, ...] | None
    decode_steps: int | None
    stream_steps: int | None
    separate_draw: bool | None
    max_logprobs: int
    max_sampling_mask: int
    max_embeddings: int
    images: bool
    max_image_tokens: int | None
    image_cache_gib: float
    image_limits: ImageLimits | Mapping[str, Any] | None
    max_logit_bias: int
    max_stop_ids: int
    strict: bool
    structured_output: bool
    deterministic: bool | None
    speculative: Speculative | Mapping[str, Any] | None
    mixed: bool
    tensor_parallel_size: int | None
    data_parallel_size: int | None
    tensor_axis: str | tuple[str, ...] | None
    routed_experts: bool
    expert_parallel: bool | None
    peer_timeout_s: float
    compilation_cache_dir: str | None


def check_fields(names: Iterable[str]) -> None:
    """ConfigError for the first name that is none of EngineConfig's, with the nearest that is."""
    known = list(EngineFields.__annotations__)
    if not (unknown := sorted(set(names) - set(known))):
        return
    near = difflib.get_close_matches(unknown[0], known, n=1)
    meant = f": did you mean {near[0]!r}?" if near else ";"
    raise ConfigError(
        f"{unknown[0]!r} is not a setting of LLM{meant} EngineConfig has {', '.join(known)}"
    )


def has_draft_model(config: EngineConfig) -> bool:
    """Return whether a second model guesses ahead."""
    return config.speculative is not None and config.speculative.has_model


def reads_mtp_head(config: EngineConfig) -> bool:
    """Return whether the files of the model have the head that guesses ahead."""
    asked = config.speculative
    return asked is not None and asked.method == "mtp" and asked.model is None


def has_head_adapters(config: EngineConfig) -> bool:
    """Return whether a draw needs to know its rows' adapters."""
    return config.max_loras > 0 and "head" in config.lora_extra


# Tokens and rows of every step with deterministic=True where the bits of a product's rows depend on
# their number.
PINNED = 64


def _powers(least: int, most: int) -> tuple[int, ...]:
    """Return the powers of two from `least` to `most`, and the sizes halfway between them."""
    count = (most // least).bit_length() - 1
    return *(size << i for i in range(count) for size in (least, least * 3 // 2)), most


def _lora_extra(kinds: Iterable[str]) -> tuple[str, ...]:
    if isinstance(kinds, str) or not set(kinds) <= set(LORA_EXTRA):
        raise ConfigError(f"lora_extra={kinds!r}: must be a tuple of {', '.join(LORA_EXTRA)}")
    return tuple(kind for kind in LORA_EXTRA if kind in kinds)


# At most a third of a step is padding (half of the smallest ones), and never fewer than 8 rows: a
# single row is a slow path of XLA on CPU.
TOKEN_BUCKETS = (16, 32, *_powers(64, 16384))
SEQ_BUCKETS = (8, *_powers(16, 4096))


def _separate_draw(config: EngineConfig, *, on_cpu: bool, alike: bool) -> bool | None:
    """Return whether a decode and its draw are two programs; None if they are until a step of both
    is compiled. alike: whether the two give the same bits.
    """
    if (config.decode_steps or 1) > 1:
        return False
    if config.separate_draw is not None or (on_cpu and alike and not config.strict):
        return config.separate_draw
    return on_cpu


def _up_to(largest: int, table: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of a table below `largest`, then the first that holds it (or `largest`
    itself past the table's end).
    """
    top = next((size for size in table if size >= largest), largest)
    return (*(size for size in table if size < top), top)
