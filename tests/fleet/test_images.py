"""Images in prompts of a fleet: read once at the front within the server's limits, known to the
router by their digests, and seen by whichever replica runs, also after another has died.
"""

import asyncio
import collections
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, ConfigError, RequestError, SamplingParams
from jpaged.config import EngineConfig
from jpaged.fleet.face import FleetLLM
from jpaged.fleet.replica import Description, FleetReplica
from jpaged.images.limits import ImageLimits
from jpaged.models.config import ModelConfig
from jpaged.request.inputs import Chat
from jpaged.request.outputs import CompletionChunk
from tests.fleet.local import LocalReplicas
from tests.vision_folder import ENGINE, config, picture, seen, write_vision_folder

LONG = "a long question about it"


PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=5, logprobs=2, ignore_eos=True)
MODEL = ModelConfig.coerce(config(), images=True)
FACTS = Description(
    model=MODEL,
    engine=EngineConfig(**ENGINE).resolve(MODEL),
    fixed={},
)


async def ask(llm: FleetLLM, prompt: Any, params: SamplingParams, **options: Any) -> Any:
    """The tokens of the pieces, and what it comes to."""
    pieces = list[int]()
    async with llm.run([prompt], params, **options) as inbox:
        while True:
            for _, item in await inbox.take():
                if not isinstance(item, CompletionChunk):
                    return pieces, item
                pieces += item.token_ids_delta


def chat(shade: int, text: str = LONG) -> Chat:
    return Chat(messages=seen_pixels(shade, text))


def seen_pixels(shade: int, text: str) -> list[dict[str, Any]]:
    image = {"type": "image", "image": picture(shade, (32, 32))}
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


def is_same(output: Any, expected: Any) -> bool:
    """Whether both drew the same, thinking the same of it."""
    a, b = output.outputs[0], expected.outputs[0]
    return a.token_ids == b.token_ids and np.allclose(
        a.token_logprobs, b.token_logprobs, rtol=0, atol=1e-5
    )


def test_images_go_to_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_vision_folder(tmp_path)
    engines = [LLM(folder, **ENGINE) for _ in range(2)]
    expected = {
        shade: engines[1].chat(seen_pixels(shade, LONG), PARAMS, use_tqdm=False)[0]
        for shade in (1, 2, 3, 12)
    }
    assert not is_same(expected[1], expected[2]), "the image is seen"
    pairs = [{"prompt": "<vis><image></vis>x", "images": [picture(i)]} for i in range(2)]
    vectors = engines[1].embed([*pairs, "no image"])
    engines[1].reset_prefix_cache()
    deaths = collections.deque[int | None]()
    replicas = LocalReplicas(
        lambda name: FleetReplica(name, engines.pop()),
        1,
        dies_after=lambda job: deaths.popleft() if deaths else None,
    )

    async def run() -> None:
        llm = FleetLLM(replicas, FACTS, folder)
        reader: Any = llm.front.inputs.images
        threads, prepare = list[str](), reader._preparer.prepare

        def noted(pixels: np.ndarray) -> Any:
            threads.append(threading.current_thread().name)
            return prepare(pixels)

        monkeypatch.setattr(reader._preparer, "prepare", noted)
        for shade in (1, 2, 3):
            _, output = await ask(llm, chat(shade), PARAMS)
            assert is_same(output, expected[shade])
        assert len(threads) == 3 and threading.main_thread().name not in threads

        # The same image is where it was; another one is nowhere, though its tokens are equal.
        held = list[int]()
        for shade in (1, 7):
            await asyncio.sleep(0.05)  # for the report behind an answer
            before = llm.router.stats()["router_held_tokens"]
            _, output = await ask(llm, chat(shade), PARAMS)
            held.append(llm.router.stats()["router_held_tokens"] - before)
            assert output.num_cached_tokens == held[-1]
        assert held == [40, 0]

        # What comes back has the images, so that it is a prompt again.
        (span,) = output.embeddings.values()
        assert span.embeddings.patches.shape == (64, 96)
        _, first = await ask(llm, chat(2), PARAMS)
        prompt = {"prompt_token_ids": first.prompt_token_ids, "embeddings": first.embeddings}
        _, more = await ask(llm, prompt, PARAMS)
        assert is_same(more, expected[2]) and more.num_cached_tokens

        # Limits are those that the server sets.
        llm.limit_images(ImageLimits.of({"local_paths": False, "max_pixels": 400}))
        for source, said in (("/etc/passwd", "path"), (picture(0, (32, 32)), "max_pixels=400")):
            with pytest.raises(RequestError, match=said):
                await ask(llm, {"prompt": "<vis><image></vis>", "images": [source]}, PARAMS)
        with pytest.raises(RequestError, match="hosts"):
            await ask(llm, Chat(messages=seen("http://example.com/a.png")), PARAMS)
        llm.limit_images(ImageLimits())

        # A replica dies after a piece was sent; what goes on has the image, read once.
        threads.clear()
        deaths.append(1)
        pieces, output = await ask(llm, chat(12), PARAMS, streaming=True)
        assert pieces == output.outputs[0].token_ids and is_same(output, expected[12])
        assert llm.stats()["requests_retried"] == 1 and len(threads) == 1

        # Vectors are of the image too.
        assert np.abs(vectors[0] - vectors[1]).max() > 1e-4
        np.testing.assert_allclose(await llm.embed([*pairs, "no image"]), vectors, atol=1e-5)
        llm.router.check()
        await llm.close()

    asyncio.run(run())


def test_a_front_that_cannot_prepare_images_says_so() -> None:
    replicas = LocalReplicas(lambda name: None, 0)
    with pytest.raises(ConfigError, match="which says how images are prepared"):
        FleetLLM(replicas, FACTS, None)
