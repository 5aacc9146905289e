"""The images and videos of requests to a server: fetched from hosts that are listed, decoded in the
threads of the engine's prompts, a few requests at a time, and bounded in what they take while
they wait.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jpaged.async_llm import AsyncLLM
from jpaged.errors import RequestError
from jpaged.fleet.face import FleetLLM
from jpaged.images.fetch import fetch
from jpaged.images.limits import DEFAULT_LIMITS, IMAGE, VIDEO, Kind
from jpaged.openai.images import (
    check_sources,
    check_takes_sources,
    is_url,
    refuse_source,
    sources_of,
)
from jpaged.openai.protocol import BodyError
from jpaged.openai.server.bodies import Served
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.wire import Held, Room
from jpaged.request.embeddings import as_mapping
from jpaged.request.inputs import Prompt

FETCHING = 16  # threads
MOST_DECODED = 4  # requests whose images are decoded at once
MOST_VIDEOS = 2  # of them, requests with videos
MOST_BYTES = 4 << 30  # of images and videos, as a tower takes them, in requests that run or wait


class Images:
    """Puts what images and videos hold in the place of their URLs. limits: the engine's where a
    server allows no less; they are the engine's from now on.
    """

    def __init__(self, llm: AsyncLLM | FleetLLM, settings: ServerSettings):
        self._llm = llm
        limits = llm.engine_config.image_limits or DEFAULT_LIMITS
        self.limits = dataclasses.replace(
            limits,
            hosts=(*limits.hosts, *settings.image_hosts),
            local_paths=False,
            private_addresses=False,
            max_images=min(limits.max_images, settings.max_images),
        )
        llm.limit_images(self.limits)
        self._fetching = ThreadPoolExecutor(FETCHING, "jpaged-fetch")
        self._turns = asyncio.Semaphore(MOST_DECODED)
        self._turns_of_videos = asyncio.Semaphore(MOST_VIDEOS)
        self._room = Room(MOST_BYTES, "this server holds too many images")

    @contextlib.asynccontextmanager
    async def loaded(self, body: Served, held: Held) -> AsyncIterator[None]:
        """Have a body's images and videos fetched, and let few requests at a time into the block,
        in which the prompt is made of them. held: takes the bytes that are fetched, as if they had
        been sent. Raises BodyError.
        """
        if not body.has_sources:
            yield
            return
        try:
            check_takes_sources(self._llm.model_config, self._llm.engine_config, body)
            check_sources(body, self.limits)
            fetched = await self._fetched(body, held)
            turns = self._turns_of_videos if body.video_sources else contextlib.nullcontext()
            async with turns, self._turns:
                images = [fetched.get((IMAGE, x), x) for x in body.image_sources]
                body.put_sources(images, [fetched.get((VIDEO, x), x) for x in body.video_sources])
                yield
        except BodyError as e:
            raise body.blaming(e) from e
        finally:
            body.put_sources(None, None)

    @contextlib.asynccontextmanager
    async def kept(self, prompts: Sequence[Any]) -> AsyncIterator[None]:
        """Count the images of prompts inside the block. Raises ApiError where there is no room."""
        with contextlib.closing(self._room.hold()) as held:
            held.take(sum(map(_size_of, prompts)))
            yield

    async def _fetched(self, body: Served, held: Held) -> dict[tuple[Kind, str], bytes]:
        """Return what the URLs among a body's sources hold, each fetched once."""
        loop, fetched = asyncio.get_running_loop(), dict[tuple[Kind, str], bytes]()
        asked = dict[tuple[Kind, str], asyncio.Future[bytes]]()
        places = dict[tuple[Kind, str], int]()
        for kind, place, source in sources_of(body):
            if is_url(source) and (kind, source) not in asked:
                run = loop.run_in_executor(self._fetching, fetch, source, self.limits, kind)
                asked[kind, source], places[kind, source] = run, place
        try:
            for key, answer in asked.items():
                try:
                    fetched[key] = await answer
                except RequestError as e:
                    refuse_source(key[0], places[key], e)
                held.take(len(fetched[key]))
        finally:
            for answer in asked.values():
                if answer.done() and not answer.cancelled():
                    answer.exception()  # looked at, so that nothing is logged of it
                answer.cancel()
        return fetched

    def close(self) -> None:
        """End the threads; what they do now, they finish."""
        self._fetching.shutdown(wait=False, cancel_futures=True)


def _size_of(prompt: Any) -> int:
    """Return the bytes of the images of a prompt that `placed` has made."""
    if isinstance(prompt, Prompt):
        prompt = {"embeddings": None if prompt.spans is None else as_mapping(prompt.spans)}
    spans = prompt.get("embeddings") if isinstance(prompt, dict) else None
    return sum(span.embeddings.patches.nbytes for span in (spans or {}).values())
