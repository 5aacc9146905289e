"""Prompts with images: the logprobs of transformers from the pixels on, in every face; hits,
samples, beams, snapshots and new weights; what compiles, what memory it takes, and what is refused.
"""

import asyncio
import base64
import copy
import dataclasses
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import jpaged
from jpaged import (
    LLM,
    CapacityError,
    ConfigError,
    EngineConfig,
    ImageLimits,
    Params,
    RequestError,
    SamplingParams,
    UnsupportedError,
)
from jpaged.images.spans import Prepared
from jpaged.models.hf_defaults import import_transformers
from jpaged.request.inputs import Chat
from jpaged.runtime.image_rows import tower_scratch
from jpaged.session import Session
from tests.golden import pictures
from tests.tiny import assert_idle, compiles

ENGINE = EngineConfig(
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=96,
    token_buckets=(96,),
    seq_buckets=(8,),
    num_blocks=96,
    max_logprobs=8,
    max_logit_bias=4,
    max_stop_ids=4,
    images=True,
)
GREEDY = SamplingParams(temperature=0, max_tokens=pictures.NEW_TOKENS, ignore_eos=True, logprobs=0)
SMALL = [(20, 20), (8, 30), (26, 14)]


def llm_of(source: Any, tokenizer: Any = None, **changes: Any) -> LLM:
    return LLM(source, tokenizer=tokenizer, **vars(dataclasses.replace(ENGINE, **changes)))


def golden_prompt(name: str, prompt: str) -> tuple[dict[str, Any], pictures.Golden]:
    ids, golden = pictures.load(name, prompt)
    return {"prompt_token_ids": ids, "images": pictures.pictures(prompt)}, golden


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures.write("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = llm_of(folder)
    yield llm
    llm.close()


def picture(seed: int, size: tuple[int, int] = (20, 20)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def png(pixels: np.ndarray, cut: int | None = None) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()[:cut]


PIXELS, LARGE = picture(11), picture(12, (24, 32))


def prompt_of(*images: Any, behind: Sequence[int] = (7,)) -> dict[str, Any]:
    """Text, the images with a token between them, and text."""
    ids = [3, 4, 5, 6]
    for _ in images:
        ids += [18, 17, 19, 9]
    return {"prompt_token_ids": [*ids, *behind], "images": list(images)}


def tokens_of(outputs: Any) -> list[list[int]]:
    return [c.token_ids for output in outputs for c in output.outputs]


def encoded(llm: LLM) -> int:
    return llm.stats()["images_encoded"]


@pytest.mark.parametrize("name", pictures.NAMES)
def test_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Several images and sizes, at once; then again, by hits, and as scores."""
    llm = llm_of(pictures.write(name, tmp_path))
    prompts, golden = zip(*(golden_prompt(name, p) for p in pictures.PROMPTS), strict=True)
    for hit in (False, True):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for output, wanted in zip(outputs, golden, strict=True):
            assert output.prompt_token_ids == wanted.token_ids
            assert output.outputs[0].token_ids == wanted.greedy
            found = output.outputs[0].token_logprobs
            np.testing.assert_allclose(found, wanted.greedy_logprobs, atol=1e-4)
            assert (output.num_cached_tokens > 4) is hit
    for found, wanted in zip(llm.score(prompts), golden, strict=True):
        np.testing.assert_allclose(np.asarray(found), wanted.logprobs, atol=1e-4)
    assert llm.stats()["images_encoded"] == 3
    assert_idle(llm)
    llm.close()


def forms_of(pixels: np.ndarray, tmp_path: Path) -> list[Any]:
    """An image in every form that a source has."""
    file, out = tmp_path / "a.png", io.BytesIO()
    Image.fromarray(pixels).save(file)
    Image.fromarray(pixels).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return [pixels, file, str(file), out.getvalue(), url, Image.fromarray(pixels)]


def test_sources_and_faces(llm: LLM, tmp_path: Path) -> None:
    pixels = picture(1)
    forms = forms_of(pixels, tmp_path)
    llm.reset_prefix_cache()
    before = encoded(llm)
    outputs = llm.generate([prompt_of(x) for x in forms], GREEDY, use_tqdm=False)
    wanted = outputs[0].outputs[0].token_ids
    assert tokens_of(outputs) == [wanted] * len(forms) and encoded(llm) == before + 1
    prompt = prompt_of(pixels)
    assert tokens_of([llm.submit(prompt, GREEDY).result()]) == [wanted]
    chunks = llm.stream([prompt], GREEDY)
    assert [t for c in chunks for t in c.token_ids_delta] == wanted
    llm.add_request(prompt, GREEDY)
    done: list[Any] = []
    while llm.has_unfinished():
        done += llm.step()
    assert tokens_of(done) == [wanted]
    with llm.rollout([prompt, prompt_of(picture(2))], GREEDY, enough=2) as groups:
        assert wanted in tokens_of(list(groups))


def test_other_faces(llm: LLM, folder: Path, tmp_path: Path) -> None:
    forms = forms_of(picture(1), tmp_path)
    prompt = prompt_of(forms[0])
    outputs = llm.generate([prompt], GREEDY, use_tqdm=False)
    wanted = outputs[0].outputs[0].token_ids
    params = jpaged.load_params(folder, images=True)
    assert tokens_of(jpaged.generate(params, [prompt], GREEDY, engine_config=ENGINE)) == [wanted]
    (beams,) = llm.beam_search([prompt], 2, 4, use_tqdm=False)
    ids = _expanded(outputs[0], wanted)
    (scores,) = np.asarray(llm.score([{**prompt, "prompt_token_ids": ids}]))
    drawn = scores[-4:]
    np.testing.assert_allclose(drawn, outputs[0].outputs[0].token_logprobs, atol=1e-5)
    assert beams.outputs[0].cumulative_logprob >= drawn.sum() - 1e-4
    (states,) = llm.hidden([prompt])
    assert states.shape == (len(outputs[0].prompt_token_ids), 24)

    async def ask() -> list[list[int]]:
        engine = jpaged.AsyncLLM(folder, **vars(ENGINE))
        tasks = [engine.complete(prompt_of(x), GREEDY) for x in forms]
        outputs = await asyncio.gather(*tasks)
        async with engine.rollout([prompt], GREEDY, enough=1) as groups:
            outputs += [group async for group in groups]
        await engine.close()
        return tokens_of(outputs)

    assert asyncio.run(ask()) == [wanted] * (len(forms) + 1)


SPECIAL = {17: "<|image_pad|>", 18: "<|vision_start|>", 19: "<|vision_end|>", 23: "<eos>"}
GEMMA = {17: "<image_soft_token>", 18: "<start_of_image>", 19: "<end_of_image>", 23: "<eos>"}
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}{{ image }}{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}t1{% endfor %}"
)


def tokenizer_of(special: dict[int, str], image: str) -> Any:
    """Words t0, t1, ... and the model's special tokens; "t22" is two ends of lines."""
    words = {special.get(i, "\n\n" if i == 22 else f"t{i}"): i for i in range(24)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
    pattern = Regex(r"t\d+|\n\n")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, "removed", invert=True)  # pyright: ignore[reportAttributeAccessIssue]
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        additional_special_tokens=list(special.values())[:3],
    )
    fast.chat_template = TEMPLATE.replace("{{ image }}", image)
    return fast


QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def test_texts_and_conversations(llm: LLM, folder: Path) -> None:
    """They have the tokens that a caller would have written."""
    tokenizer = tokenizer_of(SPECIAL, QWEN_IMAGE)
    chats = llm_of(folder, tokenizer=tokenizer)
    first, second = picture(14), picture(15, (26, 14))
    ids = [3, 18, *[17] * 4, 19, 9, 18, *[17] * 6, 19]
    text = {"prompt": f"t3{QWEN_IMAGE}t9{QWEN_IMAGE}", "images": [first, second]}
    wanted = llm.generate({"prompt_token_ids": [*ids, 1], "images": [first, second]}, GREEDY)
    (output,) = chats.generate(text, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == ids and output.prompt == text["prompt"]
    url = f"data:image/png;base64,{base64.b64encode(png(first)).decode()}"
    parts: list[Any] = [
        {"type": "text", "text": "t3"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "text", "text": "t9"},
        {"type": "image", "image": second},
    ]
    messages = [{"role": "user", "content": parts}]
    (answer,) = chats.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt_token_ids == [*ids, 1] == chats.render_chat(messages)
    assert tokens_of([answer]) == tokens_of(wanted)
    again = {"prompt_token_ids": chats.render_chat(messages), "images": [first, second]}
    assert tokens_of(chats.generate(again, GREEDY, use_tqdm=False)) == tokens_of(wanted)
    base64_part = {"type": "image", "base64": base64.b64encode(png(first)).decode()}
    for part in (
        base64_part,
        {"type": "image", "url": url},
        {"type": "image_url", "image_url": url},
    ):
        assert chats.render_chat([{"role": "user", "content": [part]}]) == [18, *[17] * 4, 19, 1]

    def refused(part: Any, message: str, *more: Any) -> None:
        with pytest.raises(RequestError, match=message):
            chats.chat([{"role": "user", "content": [part, *more]}], GREEDY, use_tqdm=False)

    refused({"type": "image"}, "1 parts of type 'image' have no image: pass it under 'image', ")
    refused({"type": "image"}, "1 parts of type 'image' have no image", base64_part)
    refused(base64_part | {"url": url}, "has url, base64: pass one of them")
    refused({"type": "image_url", "image_url": {"uri": url}}, "image_url=None: must be")
    refused({"type": "image", "path": "no.png"}, r"images\[0\]: image no.png: No such file")
    # A placeholder that somebody wrote into the text stands for no image.
    refused({"type": "text", "text": "<|image_pad|>"}, "has 2 of the placeholder", base64_part)
    # Without an image the template's placeholder is left to the caller.
    empty = [{"role": "user", "content": [{"type": "image"}]}]
    assert chats.render_chat(empty) == [18, 17, 19, 1]
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate(text, GREEDY, use_tqdm=False)
    chats.close()


def test_marks_around_images_of_gemma(tmp_path: Path) -> None:
    """Two ends of lines, also where the prompt is token ids; nothing is computed."""
    folder = pictures.write("gemma3", tmp_path)
    params = jpaged.load_params(folder, images=True)
    tokenizer = tokenizer_of(GEMMA, "<start_of_image>")
    inputs = Session(params, ENGINE, None, tokenizer, grows=False).inputs
    image = [22, 18, *[17] * 9, 19, 22]
    asked = {"prompt": "t3<start_of_image>t4", "images": [PIXELS]}
    chat = Chat(messages=[{"role": "user", "content": [{"type": "image", "image": PIXELS}]}])
    ids = {"prompt_token_ids": [3, 18, 4], "images": [PIXELS]}
    for prompt, wanted in [(asked, [3, *image, 4]), (ids, [3, *image, 4]), (chat, [*image, 1])]:
        made = inputs.prompt(prompt)
        assert list(made.ids) == wanted and made.spans is not None
        assert [(span.start, span.end) for span in made.spans] == [
            (wanted.index(17), wanted.index(17) + 9)
        ]


def _expanded(output: Any, behind: list[int]) -> list[int]:
    return [*output.prompt_token_ids, *behind]


def test_an_image_of_a_hit_is_not_encoded(llm: LLM) -> None:
    """The digest says which blocks are its; another image, or place, is computed."""
    llm.reset_prefix_cache()
    first, second, third = (picture(i, size) for i, size in enumerate(SMALL, start=10))
    before = encoded(llm)
    llm.generate([prompt_of(first, second)], GREEDY, use_tqdm=False)
    assert encoded(llm) == before + 2
    embedded = llm.stats()["embedded_tokens"]
    (again,) = llm.generate([prompt_of(first, second, behind=[7, 7, 7])], GREEDY, use_tqdm=False)
    # Both images are in what is found.
    assert again.num_cached_tokens >= 16 and llm.stats()["embedded_tokens"] == embedded
    llm.session.runner.images.cache.clear()  # pyright: ignore[reportOptionalMemberAccess]
    (part,) = llm.generate([prompt_of(first, third)], GREEDY, use_tqdm=False)
    assert part.num_cached_tokens == 12
    assert encoded(llm) == before + 3, "the first image is not encoded again"
    (other,) = llm.generate([prompt_of(second, first)], GREEDY, use_tqdm=False)
    assert other.num_cached_tokens <= 5
    plain = {"prompt_token_ids": again.prompt_token_ids}
    (text,) = llm.generate([plain], GREEDY, use_tqdm=False)
    assert text.num_cached_tokens <= 5, "placeholders alone are other content"


def test_what_is_kept_has_a_budget(folder: Path) -> None:
    """Without any, an image is encoded once a request, though chunks cut it."""
    llm = llm_of(folder, image_cache_gib=0, max_num_batched_tokens=12, max_embeddings=96)
    prompt = prompt_of(picture(3, (24, 32)))
    outputs = llm.generate([prompt], GREEDY, use_tqdm=False)
    stats = llm.stats()
    assert stats["images_encoded"] == 1 and stats["image_cache_bytes"] == 0
    assert stats["prefill_steps"] == 2, "[0, 12) and [12, 20), of which [5, 17) is the image"
    llm.generate([prompt_of(picture(13))], GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    again = llm.generate([prompt], dataclasses.replace(GREEDY, n=3), use_tqdm=False)
    assert tokens_of(again) == tokens_of(outputs) * 3
    assert encoded(llm) == 3
    llm.close()


def test_outputs_are_prompts_and_snapshots_hold_images(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = prompt_of(picture(4), picture(5, (12, 20)))
    (whole,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert whole.embeddings is not None and list(whole.embeddings) == [5, 12]
    assert all(isinstance(span.embeddings, Prepared) for span in whole.embeddings.values())
    llm.reset_prefix_cache()
    llm.add_request(prompt, GREEDY, request_id="cut")
    llm.step()
    snapshot = llm.snapshot()
    for _ in range(2):
        llm.restore(snapshot)
        done: list[Any] = []
        while llm.has_unfinished():
            done += llm.step()
        assert tokens_of(done) == tokens_of([whole])
    llm.add_request(prompt, GREEDY, request_id="cut")
    for _ in range(3):
        llm.step()
    cut = llm.abort("cut")
    assert cut is not None and len(cut.outputs[0].token_ids) < 4
    llm.reset_prefix_cache()
    assert tokens_of(llm.generate([copy.deepcopy(cut)], GREEDY)) == tokens_of([whole])


def test_text_has_its_bits_in_company_of_images(llm: LLM) -> None:
    """Whether rows of the same steps have images or not."""
    texts = [[3, 4, 5, 6, 7], [8, 9] * 6]
    asked = dataclasses.replace(GREEDY, max_tokens=8)
    alone = llm.generate(texts, asked, use_tqdm=False)
    llm.reset_prefix_cache()
    together = llm.generate([*texts, prompt_of(picture(6))], asked, use_tqdm=False)
    for one, other in zip(alone, together, strict=False):
        first, second = one.outputs[0], other.outputs[0]
        assert first.token_ids == second.token_ids
        assert first.token_logprobs.tobytes() == second.token_logprobs.tobytes()


def test_new_weights(folder: Path) -> None:
    """They compile nothing, and images are encoded by them, also of what runs when they come."""
    params = jpaged.load_params(folder, images=True)
    tower = jax.tree.map(lambda x: 1.1 * x, params["vision"])
    moved = Params(dict(params) | {"vision": tower}, params.config, params.source)
    prompt = prompt_of(picture(7), picture(8))
    fresh = llm_of(moved)
    ((wanted, logprobs),) = _drawn(fresh, prompt)
    fresh.close()
    llm = llm_of(params)
    ((_, before),) = _drawn(llm, prompt)
    assert np.abs(before - logprobs).max() > 1e-3
    with compiles() as names:
        llm.update_params(moved)
        ((tokens, found),) = _drawn(llm, prompt)
    assert not [name for name in names if "run_tower" in name or "prefill" in name]
    assert tokens == wanted and found.tobytes() == logprobs.tobytes()
    assert encoded(llm) == 4
    # Queued under the old weights; computed, and found, under the new ones.
    llm.update_params(params)
    llm.add_request(prompt, GREEDY)
    llm.update_params(moved, mode="keep")
    done: list[Any] = []
    while llm.has_unfinished():
        done += llm.step()
    assert done[0].outputs[0].token_logprobs.tobytes() == logprobs.tobytes()
    (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens > 0 and tokens_of([again]) == [wanted]
    # Recomputed in the middle of a completion.
    llm.update_params(params)
    llm.add_request(prompt, dataclasses.replace(GREEDY, max_tokens=8))
    llm.step()
    llm.update_params(moved, mode="recompute")
    done = []
    while llm.has_unfinished():
        done += llm.step()
    ids = _expanded(done[0], done[0].outputs[0].token_ids)
    (scores,) = np.asarray(llm.score([{**prompt, "prompt_token_ids": ids}]))
    versions = done[0].outputs[0].weight_versions
    start = versions[-1].start
    np.testing.assert_allclose(
        done[0].outputs[0].token_logprobs[start:], scores[-8:][start:], atol=1e-5
    )
    llm.close()


def _drawn(llm: LLM, prompt: Any) -> list[tuple[list[int], np.ndarray]]:
    outputs = llm.generate([prompt], GREEDY, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].token_logprobs) for o in outputs]


def test_nothing_compiles_once_warm(folder: Path) -> None:
    """A strict engine has the tower's buckets in its table."""
    llm = llm_of(folder, strict=True, max_image_tokens=40)
    named = [name for name in llm.stats()["buckets"] if "images" in name]
    assert named == ["encode_images 40"]
    prompts = [prompt_of(picture(i, size)) for i, size in enumerate(SMALL)]
    with compiles() as names:
        llm.generate([*prompts, prompt_of(*map(picture, range(4))), [3, 4]], GREEDY, use_tqdm=False)
    assert names == []
    llm.close()


def test_the_tower_over_devices(folder: Path) -> None:
    prompts = [prompt_of(picture(9), picture(10, (12, 20))), prompt_of(picture(9))]
    one = llm_of(folder)
    two = llm_of(folder, data_parallel_size=2, tensor_parallel_size=2)
    wanted = one.generate(prompts, GREEDY, use_tqdm=False)
    found = two.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of(found) == tokens_of(wanted)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            x.outputs[0].token_logprobs, y.outputs[0].token_logprobs, atol=1e-5
        )
    one.close()
    two.close()
    # Nothing is kept, chunks cut both images, and replicas compute them in the same steps.
    cut = llm_of(
        folder,
        data_parallel_size=2,
        image_cache_gib=0,
        max_num_batched_tokens=12,
        max_embeddings=96,
    )
    cut.generate([prompt_of(picture(i, (24, 32))) for i in (1, 2)], GREEDY, use_tqdm=False)
    assert encoded(cut) == 2
    cut.close()


def test_the_plan_has_tower_and_pool(folder: Path) -> None:
    with_images = dataclasses.replace(ENGINE, dtype="float32")
    text = dataclasses.replace(with_images, images=False)
    whole, part = (jpaged.plan_memory(folder, c, compiled=False) for c in (with_images, text))
    params = jpaged.load_params(folder, images=True)
    tower = sum(x.nbytes for x in jax.tree.leaves(params["vision"]))
    assert whole.weights - part.weights == tower
    resolved = with_images.resolve(params.config)
    assert resolved.max_embeddings == 96
    scratch = tower_scratch(params.config, resolved)
    assert whole.account["tower"] == scratch > 0 and "tower" not in part.account
    pool = (96 + 96) * 3 * 24 * 4  # rows and those that go up at once, with two of deepstack
    assert whole.needs.state - part.needs.state == pool


BAD: list[tuple[Any, str]] = [
    (prompt_of(b"nothing"), r"images\[0\]: image of bytes: is no image"),
    (prompt_of(PIXELS, png(PIXELS, -40)), r"images\[1\]: .* a truncated or damaged image"),
    (prompt_of("no/such/file.png"), r"images\[0\]: image no/such/file.png: No such file"),
    (prompt_of("http://127.0.0.1/a.png"), r"images\[0\]: image URL: none are fetched"),
    (prompt_of(PIXELS.astype(np.float32)), r"images\[0\]: image of dtype float32"),
    (prompt_of(7), r"images\[0\]: an image of type int"),
    (prompt_of(np.zeros((4, 900, 3), np.uint8)), r"images\[0\]: image of 900 x 4 pixels"),
    (prompt_of(PIXELS) | {"images": PIXELS}, "images of type ndarray: pass a list"),
    (prompt_of(PIXELS) | {"images": []}, "has 1 of the placeholder 17, and 0 images"),
    (prompt_of(PIXELS) | {"images": [PIXELS] * 2}, "has 1 of the placeholder 17, and 2 images"),
    (
        prompt_of(PIXELS) | {"embeddings": {0: np.zeros((1, 24))}},
        "images or videos beside embeddings",
    ),
    (prompt_of(*[LARGE] * 6), "images of 72 tokens and more leave no room in max_model_len=64"),
    (prompt_of(*[LARGE] * 5), "prompt of 80 tokens leaves no room"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD)
def test_bad_images_are_that_requests_error(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], GREEDY, use_tqdm=False)
    good, failed = llm.generate([[3, 4], prompt], GREEDY, on_error="return", use_tqdm=False)
    assert good.error is None and isinstance(failed.error, RequestError)
    assert_idle(llm)


def test_limits(folder: Path, llm: LLM) -> None:
    other, bounds = llm, {"max_side": 24, "local_paths": False, "max_images": 2}
    llm = llm_of(folder, image_limits=bounds, max_image_tokens=4)
    assert llm.engine_config.image_limits == ImageLimits(
        max_side=24, local_paths=False, max_images=2
    )
    for prompt, message in [
        (prompt_of(picture(1, (8, 30))), "max_side=24"),
        (prompt_of("a.png"), "paths of this machine are not read"),
        (prompt_of(*[PIXELS] * 3), "3 images in a prompt: the limit is max_images=2"),
    ]:
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt], GREEDY, use_tqdm=False)
    # Larger ones are made smaller.
    (output,) = llm.generate([prompt_of(picture(1, (24, 24)))], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids.count(17) == 4
    # Prepared by another engine, which takes larger ones.
    (larger,) = other.generate([prompt_of(LARGE)], GREEDY, use_tqdm=False)
    prompt = {"prompt_token_ids": larger.prompt_token_ids, "embeddings": larger.embeddings}
    good, failed = llm.generate([[3, 4], prompt], GREEDY, on_error="return", use_tqdm=False)
    assert good.error is None and isinstance(failed.error, CapacityError)
    assert "an image or a video of 12 tokens at 5: the limit is 4" in str(failed.error)
    assert_idle(llm)
    llm.close()
    for bad in ({"max_sides": 1}, {"max_side": 0}, {"hosts": "a.b"}, {"local_paths": 1}, 7):
        with pytest.raises(ConfigError, match=r"image_limits=|ImageLimits: "):
            EngineConfig(image_limits=bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="image_cache_gib=-1"):
        EngineConfig(image_cache_gib=-1)


def test_what_it_needs(folder: Path, llm: LLM) -> None:
    text = llm_of(folder, images=False)
    (failed,) = text.generate([prompt_of(PIXELS)], GREEDY, on_error="return", use_tqdm=False)
    assert isinstance(failed.error, RequestError)
    assert failed.error.rule == "images_need_the_setting"
    (output,) = llm.generate([prompt_of(PIXELS)], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="without its vision tower"):
        text.generate([output], GREEDY, use_tqdm=False)
    text.close()
    with pytest.raises(ConfigError, match="no vision tower; pass a folder") as no_tower:
        llm_of(jpaged.load_params(folder))
    assert no_tower.value.rule == "images_need_a_tower"
    params = jpaged.load_params(folder, images=True)
    with pytest.raises(ConfigError, match="params of no known folder"):
        llm_of(Params(dict(params), params.config))
    guess: dict[str, Any] = {"speculative": {"method": "draft", "model": params}}
    with pytest.raises(UnsupportedError) as guesses:
        LLM(params, **dict(vars(ENGINE), **guess))
    assert guesses.value.rule == "guesses_of_models_read_tokens"
    # A tree with the tower, described by a folder.
    tree = LLM(folder, params=dict(params), **vars(ENGINE))
    assert tokens_of(tree.generate([prompt_of(PIXELS)], GREEDY)) == tokens_of([output])
    tree.close()
