"""What computes the steps is chosen once when an engine starts, never while a step is traced."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.shapes import shape_table
from jpaged.errors import UnsupportedError
from jpaged.models.forward import bind
from jpaged.models.layers.experts import ExpertsConfig
from jpaged.models.quantized import quantized
from jpaged.runtime import choices
from jpaged.runtime.choices import Choices, activations_of, choose_products, multiplies_fp8
from jpaged.runtime.mesh import Placement
from jpaged.runtime.resolve import MOST_COST, resolve
from jpaged.runtime.runner import Runner, choose_for
from kernels_cpu import library, paged_attention
from kernels_cpu.linear import NativeProducts
from kernels_cpu.quantized import ACTIVATIONS
from kernels_cpu.rates import Rates
from tests.tiny import CONFIG, config, engine, make_params, make_prompts

NATIVE = NativeProducts(most_rows=None)
WIDE = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=96, head_dim=32)
ONE_DEVICE = Placement(mesh=None, axis=None, device=jax.devices()[0])


def asked() -> str | None:
    raise AssertionError("the library of C++ kernels was asked for")


def test_the_library_is_asked_for_bf16_on_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda: None)
    monkeypatch.setattr(library, "level", lambda: None)
    monkeypatch.setattr(choices, "rates", lambda: Rates(ratios={8: 0.5, 64: 0.9, 512: 1.1}))

    def chosen(dtype: Any, deterministic: bool = False) -> Any:
        return choose_products(ONE_DEVICE.device, dtype, deterministic=deterministic)

    assert chosen(jnp.bfloat16) == NativeProducts(most_rows=64)
    assert chosen(jnp.bfloat16, deterministic=True) == chosen("bfloat16", deterministic=True)
    assert chosen("bfloat16", deterministic=True) == NATIVE
    monkeypatch.setattr(library, "unavailable", lambda: "no compiler")
    assert chosen(jnp.bfloat16) is None
    monkeypatch.setattr(library, "unavailable", asked)
    assert chosen(jnp.float32) is None


def test_activations_are_chosen_by_name_or_by_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda: None)
    monkeypatch.setattr(choices, "rates", lambda: Rates(ratios={8: 0.5}))

    def chosen(activations: str, dtype: Any = jnp.bfloat16) -> Any:
        device = ONE_DEVICE.device
        return choose_products(device, dtype, deterministic=False, activations=activations)

    for level in library.LEVELS:
        monkeypatch.setattr(library, "level", lambda level=level: level)
        assert chosen("auto").activations == level.activations
        for name in ACTIVATIONS:
            assert chosen(name).activations == name
    # Elsewhere XLA multiplies, which rounds no x.
    for name in ("auto", "plain"):
        assert chosen(name, jnp.float32) is None
    with pytest.raises(UnsupportedError, match=r"quantized_activations='int8'.*dtype is float32"):
        chosen("int8", jnp.float32)
    monkeypatch.setattr(library, "unavailable", lambda: "no compiler")
    with pytest.raises(UnsupportedError, match=r"quantized_activations='int16'.*\(no compiler\)"):
        chosen("int16")


def test_which_activations_served() -> None:
    def serves(form: Any, activations: str | None, in_fp8: bool = False) -> str | None:
        tree: dict[str, Any] = {"w": jnp.ones((2, 32), jnp.bfloat16)}
        if form is not None:
            tree["q"] = quantized(tree["w"], form, 1)
        asked = (
            None if activations is None else NativeProducts(most_rows=None, activations=activations)
        )
        return activations_of(
            Choices(dtype=jnp.dtype(jnp.float32), attention=(), products=asked, in_fp8=in_fp8), tree
        )

    assert serves(None, "int8") is None
    assert [serves(form, "int8") for form in ("int8", "int4", "fp8")] == ["int8", "int8", "plain"]
    assert serves("int4", "int16") == "int16" and serves("int4", None) == "plain"
    assert (
        serves("fp8", None, in_fp8=True) == "fp8" and serves("int8", None, in_fp8=True) == "plain"
    )


def test_experts_of_several_widths_share_an_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that refuses the width of a single layer serves none."""
    narrow = config(num_experts=4, experts_per_token=2, expert_size=32)
    wide = config(num_experts=4, experts_per_token=2, expert_size=64)
    model = dataclasses.replace(narrow, layers=(narrow.layers[0], wide.layers[1]))
    where, settings = (
        Placement(mesh=None, axis=None, device=jax.devices()[0]),
        engine().resolve(model),
    )
    assert choices.choose(model, settings, where, jnp.float32).experts is not None
    asked: list[int] = []

    def unsupported(shapes: Any, device: Any) -> str | None:
        asked.append(shapes.expert_size)
        return None if shapes.expert_size == 32 else "too wide"

    first = SimpleNamespace(
        is_compiled_for=lambda platform: True,
        module=lambda: SimpleNamespace(unsupported=unsupported),
        is_batch_invariant=lambda: True,
    )
    implementations = {"narrow": first, **choices.experts.IMPLEMENTATIONS}
    monkeypatch.setattr(choices.experts, "IMPLEMENTATIONS", implementations)
    chosen = choices._experts(model, where.device, jnp.float32, True)
    assert chosen is not None and chosen is not first and asked == [32, 64]
    only = choices._experts(narrow, where.device, jnp.float32, True)
    assert only is implementations["narrow"]


def test_which_devices_multiply_fp8() -> None:
    kinds = {"9.0": True, "10.0": True, "8.9": True, "12.0": True, "8.0": False, "gfx942": False}
    for capability, expected in kinds.items():
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        assert multiplies_fp8(device) is expected
    assert not multiplies_fp8(ONE_DEVICE.device)


def test_deterministic_by_default_where_it_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda: None)
    monkeypatch.setattr(paged_attention, "unavailable", lambda: None)
    for worst, asked_for, expected in (
        (MOST_COST, None, True),
        (MOST_COST + 0.01, None, False),
        (MOST_COST + 0.01, True, True),
        (0.5, False, False),
    ):
        for module in ("jpaged.runtime.resolve", "jpaged.runtime.choices"):
            monkeypatch.setattr(f"{module}.rates", lambda worst=worst: Rates(ratios={512: worst}))
        config = EngineConfig(deterministic=asked_for)
        resolved, chosen = resolve(WIDE, config, ONE_DEVICE, jnp.bfloat16)
        assert resolved.deterministic is expected and not resolved.pinned
        assert chosen.is_batch_invariant and chosen.products is not None
        assert (chosen.products.most_rows is None) == (expected or worst < 1)


def test_a_pinned_config_has_choices_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """deterministic=True without kernels that compute a row alike in any batch."""
    monkeypatch.setattr(library, "unavailable", lambda: "no compiler")
    resolved, chosen = resolve(
        WIDE, EngineConfig(deterministic=True), ONE_DEVICE, jnp.bfloat16, is_plain=True
    )
    assert resolved.pinned and resolved.max_num_seqs == 64
    assert [kernel and kernel.shapes.num_rows for kernel in chosen.attention] == [64]
    assert chosen.products is None and not chosen.is_batch_invariant


@pytest.mark.parametrize("guesses", [False, True], ids=["alone", "with a draft model"])
def test_everything_is_chosen_once_a_start(guesses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the config, the memory plan, and the engine that runs."""
    model = config(sliding_windows=(None, 7))
    asked = list[tuple[str, int | None]]()

    def counted(name: str) -> None:
        function = getattr(choices, name)

        def watched(*args: Any, **how: Any) -> Any:
            first = args[0]  # a model for its experts, a group for its kernel
            asked.append((name, first.num_layers if name == "_experts" else first.window))
            return function(*args, **how)

        monkeypatch.setattr(choices, name, watched)

    counted("choose_kernel")
    counted("_experts")
    draft = make_params(1, config(num_layers=1))
    sizes: Any = vars(engine(num_blocks=None))
    sizes |= {"speculative": {"method": "draft", "model": draft} if guesses else None}
    llm = LLM(make_params(0, model), **sizes)
    llm.generate(make_prompts(5), SamplingParams(max_tokens=2), use_tqdm=False)
    llm.close()
    expected = [("_experts", 2), ("choose_kernel", None), ("choose_kernel", 7)]
    if guesses:
        expected += [("_experts", 1), ("choose_kernel", None)]
    assert sorted(asked, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_chosen_by_the_params_fits_what_is_served(quantization: Any, dtype: str) -> None:
    """The form of the weights is known before they are made: by the params and the config."""
    mixture = {"num_experts": 4, "experts_per_token": 2, "expert_size": 32}
    model = config(hidden_size=64, head_dim=32, tie_word_embeddings=True, **mixture)
    speculative = {"method": "draft", "model": make_params(1, model)}
    sizes: Any = vars(engine(dtype=dtype, quantization=quantization))
    sizes |= {"speculative": speculative}
    session = LLM(make_params(0, model), **sizes).session
    runner = session.runner
    assert runner.params is not None and runner.draft_params is not None
    draft = (model, runner.draft_params)
    served = choose_for(model, runner.config, session.served.placement, runner.params, draft)
    assert served == runner.compiled.setting.choices and served.experts is not None


@pytest.mark.parametrize("chosen", ["chosen", "native"])
def test_tracing_a_step_never_asks_for_the_library(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of every phase; with whatever this processor has, and as if it had the C++ one."""
    monkeypatch.setattr(choices, "rates", lambda: Rates(ratios={512: 0.5}))
    if chosen == "native":
        monkeypatch.setattr(choices, "choose_products", lambda *_, **__: NATIVE)
    settings = engine().resolve(CONFIG)
    params = jax.device_put(make_params(0, CONFIG, jnp.bfloat16), ONE_DEVICE.replicated)
    runner = Runner(CONFIG, settings, ONE_DEVICE, bind(CONFIG, params))
    for module in (library, paged_attention):
        monkeypatch.setattr(module, "unavailable", asked)
    table = {
        bucket.phase: bucket for bucket in sorted(shape_table(settings), key=lambda s: s.order)
    }
    assert set(table) == {"prefill", "sample", "decode"}
    for bucket in table.values():
        lowered = runner.compiled.lower(bucket).as_text()
        assert ("jpaged_linear" in lowered) == (
            runner.compiled.setting.choices.products is not None
        )


@pytest.mark.train
def test_training_never_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", asked)
    params = make_params(0, CONFIG, jnp.bfloat16)

    def loss(params: Any) -> jax.Array:
        model = bind(CONFIG, params)
        return jnp.sum(model.logits(model(jnp.asarray(make_prompts(6)))[0]))

    jax.jit(jax.grad(loss)).lower(params)


def test_experts_may_differ_by_layer() -> None:
    """One implementation serves them all: the widths of every layer are asked about."""
    mixture = {"num_experts": 4, "experts_per_token": 2, "expert_size": 32}
    model = config(hidden_size=64, head_dim=32, **mixture)
    first, second = model.layers
    assert isinstance(second.ffn, ExpertsConfig)
    narrow = dataclasses.replace(second.ffn, expert_size=16, num_experts=2)
    model = dataclasses.replace(model, layers=(first, dataclasses.replace(second, ffn=narrow)))
    with pytest.raises(AttributeError, match=r"by layer: read config\.layers"):
        _ = model.expert_size
    found = choices._experts(model, ONE_DEVICE.device, jnp.dtype(jnp.float32), True)
    assert found is not None and found is choices._experts(
        config(hidden_size=64, **mixture), ONE_DEVICE.device, jnp.dtype(jnp.float32), True
    )
