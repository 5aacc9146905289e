"""What a server serves and with what, and the requests that run now: for its page and for people
who look.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jpaged.async_llm import AsyncLLM
from jpaged.engine.sequence import Request
from jpaged.fleet.face import FleetLLM, FrontModel
from jpaged.fleet.facts import fixed_facts
from jpaged.images.videos import why_no_videos
from jpaged.llm import LLM
from jpaged.openai.images import why_no_images
from jpaged.openai.parts import Format
from jpaged.openai.server.settings import ServerSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """An HTTP request whose completions run. arrived: by the monotonic clock. party: who asks.
    requests: the engine's, one for each prompt.
    """

    name: str
    route: str
    model: str
    party: str
    streams: bool
    arrived: float
    requests: list[Request]

    def report(self, now: float) -> dict[str, Any]:
        sequences = [seq for request in self.requests for seq in request.sequences]
        drawn = sum(seq.num_generated for seq in sequences)
        seconds = max(now - self.arrived, 1e-3)
        return {
            "id": self.name,
            "route": self.route,
            "model": self.model,
            "stream": self.streams,
            "seconds": round(seconds, 3),
            "completions": len(sequences),
            "prompt_tokens": sum(r.sequences[0].prompt_len for r in self.requests),
            "generated_tokens": drawn,
            "tokens_per_second": round(drawn / seconds, 2),
        }


class Status:
    """The figures of GET /status. The event loop alone touches it."""

    def __init__(
        self, llm: AsyncLLM | FleetLLM, settings: ServerSettings, format: Format, started_at: float
    ):
        self._llm, self._settings, self._format = llm, settings, format
        self._started_at, self._began = started_at, time.monotonic()
        self._running: dict[str, Running] = {}

    @contextmanager
    def running(self, request: Running) -> Iterator[None]:
        """List a request inside the block."""
        self._running[request.name] = request
        try:
            yield
        finally:
            del self._running[request.name]

    async def report(self, party: str | None) -> dict[str, Any]:
        """Return the body of the answer. party: whose requests are listed; None lists all."""
        fixed = await self._llm.prepare(_fixed)
        now = time.monotonic()
        listed = [r for r in self._running.values() if party in (None, r.party)]
        return {
            "model": self._settings.models[0],
            "adapters": sorted(self._llm.adapters),
            "tool_style": self._format.style,
            "separates_reasoning": self._format.thinks,
            **fixed,
            "started_at": round(self._started_at, 3),
            "uptime_s": round(now - self._began, 3),
            "requests": [request.report(now) for request in listed],
        }


def _fixed(llm: LLM | FrontModel) -> dict[str, Any]:
    """Return what stays the same while a server runs."""
    facts = llm.fixed if isinstance(llm, FrontModel) else fixed_facts(llm)
    return {**facts, "images": _images(llm)}


def _images(llm: LLM | FrontModel) -> dict[str, Any]:
    """Return what a request may have as images and videos; or why it may have none."""
    reader = llm.session.inputs.images
    if reader is None:
        return {"refused": why_no_images(llm.model_config, llm.engine_config)}
    limits = reader.limits
    return {
        "refused": None,
        "formats": list(limits.formats),
        "max_images": limits.max_images,
        "videos_refused": why_no_videos(reader.vision),
        "max_bytes": limits.max_bytes,
        "max_pixels": limits.max_pixels,
        "hosts": list(limits.hosts),
    }
