"""Loads the images of requests: by URL from hosts that are listed, from data: URLs; decoded in
threads, a few requests at a time, while the event loop goes on.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jpaged.async_llm import AsyncLLM
from jpaged.errors import RequestError
from jpaged.images.fetch import fetch
from jpaged.images.limits import DEFAULT_LIMITS
from jpaged.images.sources import load_image
from jpaged.openai.images import (
    check_pixels,
    check_sources,
    check_takes_images,
    is_url,
    refuse_image,
)
from jpaged.openai.protocol import GenerationRequest
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.wire import Held

FETCHING, DECODING = 16, 4  # threads
MOST_DECODED = 2  # requests whose images are decoded, and not yet made into a prompt, at once


class Images:
    """Puts the images of a body in the place of their sources. limits: of images, those of the
    engine where a server allows no less.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings):
        self._llm = llm
        limits = llm.engine_config.image_limits or DEFAULT_LIMITS
        self.limits = dataclasses.replace(
            limits,
            hosts=(*limits.hosts, *settings.image_hosts),
            local_paths=False,
            private_addresses=False,
            max_images=min(limits.max_images, settings.max_images),
        )
        self._fetching = ThreadPoolExecutor(FETCHING, "jpaged-fetch")
        self._decoding = ThreadPoolExecutor(DECODING, "jpaged-images")
        self._turns = asyncio.Semaphore(MOST_DECODED)

    @contextlib.asynccontextmanager
    async def loaded(self, body: GenerationRequest, held: Held) -> AsyncIterator[None]:
        """Have the body's images loaded inside the block, in which the prompt is made of them.
        held: takes the bytes that are fetched, as if they had been sent. Raises BodyError.
        """
        sources = body.image_sources
        if not sources:
            yield
            return
        check_takes_images(self._llm.model_config, self._llm.engine_config)
        check_sources(sources, self.limits)
        fetched = await self._fetched(sources, held)
        async with self._turns:
            try:
                body.put_images(await self._decoded(sources, fetched))
                yield
            finally:
                body.put_images(None)

    async def _fetched(self, sources: list[str], held: Held) -> dict[str, bytes]:
        """Return what the URLs among the sources hold, each fetched once."""
        loop, urls = asyncio.get_running_loop(), [s for s in dict.fromkeys(sources) if is_url(s)]
        asked = {url: loop.run_in_executor(self._fetching, fetch, url, self.limits) for url in urls}
        fetched: dict[str, bytes] = {}
        for url, answer in asked.items():
            try:
                fetched[url] = await answer
            except RequestError as e:
                for other in asked.values():
                    other.cancel()
                refuse_image(sources.index(url), len(sources), e)
            held.take(len(fetched[url]))
        return fetched

    async def _decoded(self, sources: list[str], fetched: dict[str, bytes]) -> list[np.ndarray]:
        """Return the pixels of all images, those of equal sources once."""
        loop, pixels = asyncio.get_running_loop(), dict[str, np.ndarray]()
        total = 0
        for place, source in enumerate(sources):
            if source not in pixels:
                held: Any = fetched.get(source, source)
                load = loop.run_in_executor(self._decoding, load_image, held, self.limits)
                try:
                    pixels[source] = await load
                except RequestError as e:
                    refuse_image(place, len(sources), e)
                total += pixels[source].shape[0] * pixels[source].shape[1]
                check_pixels(total, self.limits)
        return [pixels[source] for source in sources]

    def close(self) -> None:
        """End the threads; what they do now, they finish."""
        for pool in (self._fetching, self._decoding):
            pool.shutdown(wait=False, cancel_futures=True)
