"""Prompts computed by engines of one kind and gone on with by engines of another, which share a
prefix store (docs/prefix_store.md).

    jpaged store --listen 10.0.0.5:7400 --gib 100
    jpaged serve MODEL --prefix-store tcp://10.0.0.5:7400 --prefix-store-policy write_through
    jpaged serve MODEL --prefix-store tcp://10.0.0.5:7400

Each request takes two steps: the first kind computes its prompt, and ends once the blocks are in
the store; the second is asked the whole request, finds them there, computes what follows the last
whole block, and draws. Draws depend on the request alone, so the answer is that of one engine. The
second step is all that an answer needs: where the first fails, it computes the prompt.
"""

import dataclasses
import http.client
import itertools
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jpaged.errors import ConfigError
from jpaged.llm import LLM
from jpaged.request.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams

PATHS = ("/v1/completions", "/v1/chat/completions")
# Of a body, what decides nothing of the prompt and is of no use with its one token.
ANSWER_ONLY = (
    *("stream", "stream_options", "best_of", "logprobs", "top_logprobs", "echo", "stop"),
    *("response_format", "min_tokens", "suffix", "store"),
)
CONNECT_S = 5.0  # an address that takes no connection for so long is down
DOWN_S = 5.0  # a server that could not be reached is not asked first for so long
END = "[DONE]"  # the last event of a stream


class PrefillDecode:
    """Two LLMs with the same weights and prefix_store. prefill: computes prompts, so its
    prefix_store_policy is "write_through". decode: draws. ConfigError where they cannot be a pair.
    """

    def __init__(self, prefill: LLM, decode: LLM):
        for llm, policies in ((prefill, ("write_through",)), (decode, None)):
            config = llm.session.engine_config
            if config.prefix_store is None:
                raise ConfigError("prefill and decode apart take a prefix_store that both have")
            if policies is not None and config.prefix_store_policy not in policies:
                raise ConfigError(
                    f"prefix_store_policy={config.prefix_store_policy!r}: the LLM that computes "
                    'prompts takes "write_through"'
                )
        self.prefill, self.decode = prefill, decode

    def generate(
        self,
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        seed: int | jax.Array | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt, as LLM.generate of `decode` does. What asks for logprobs of its
        prompt is computed there alone, since each of its tokens has to be.
        """
        asked = SamplingParams() if sampling_params is None else sampling_params
        params_of = [asked] * len(prompts) if isinstance(asked, SamplingParams) else list(asked)
        first = [
            (prompt, prompt_only(params))
            for prompt, params in zip(prompts, params_of, strict=True)
            if params.prompt_logprobs is None
        ]
        if first:
            self.prefill.generate(
                [prompt for prompt, _ in first],
                [params for _, params in first],
                on_error="return",
                use_tqdm=False,
            )
        return self.decode.generate(prompts, params_of, seed=seed, use_tqdm=False)


def prompt_only(params: SamplingParams) -> SamplingParams:
    """Return what computes the prompt of a request of these, and draws one token that is not
    used.
    """
    return dataclasses.replace(
        SamplingParams(temperature=0.0, max_tokens=1), priority=params.priority
    )


class PrefillDecodeClient:
    """Servers of both kinds by their addresses, http://HOST:PORT each, which take turns. api_key:
    of all of them. timeout_s: that one may be silent. prefill_timeout_s: that one of the first kind
    may be, from which nobody waits for more than a prompt. Any thread may call.

    failed_prefills: requests whose prompt the second kind had to compute, since no server of the
    first kind answered. One that is silent for too long is asked nothing more of a request: the
    next one would keep it waiting as long.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        prefill_timeout_s: float = 60.0,
    ):
        if not prefill or not decode:
            raise ConfigError("prefill and decode apart take a server of each kind at least")
        self._prefill, self._decode = _Turns(prefill), _Turns(decode)
        self._key, self._timeout_s = api_key, timeout_s
        self._prefill_timeout_s = min(prefill_timeout_s, timeout_s)
        self.failed_prefills = 0

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a body of /v1/completions or /v1/chat/completions, without
        `stream`. urllib.error.HTTPError where it is refused, OSError where no server answers.
        """
        with self._answered(path, {**body, "stream": False}) as response:
            try:
                return json.loads(response.read())
            except (http.client.HTTPException, ValueError) as e:
                raise ConnectionError(f"an answer that is not whole: {e!r}") from e

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an answer as they come; errors as of `ask`, also where the stream
        ends before its end.
        """
        with self._answered(path, {**body, "stream": True}) as response:
            data = ""
            try:
                for line in response:
                    if line.startswith(b"data:"):
                        data = line.decode().removeprefix("data:").strip()
                        if data != END:
                            yield json.loads(data)
            except (http.client.HTTPException, ValueError) as e:
                raise ConnectionError(f"a stream that is not whole: {e!r}") from e
            if data != END:
                raise ConnectionError("a stream that is not whole")

    def _answered(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        if path not in PATHS:
            raise ConfigError(f"path {path!r}: must be {' or '.join(PATHS)}")
        try:
            seconds = self._prefill_timeout_s
            with self._post(self._prefill, path, prompt_body(body), seconds) as response:
                response.read()
        except urllib.error.HTTPError as e:  # the second step says what is wrong with the request
            self.failed_prefills += e.code >= 500
            e.close()
        except (OSError, http.client.HTTPException):
            self.failed_prefills += 1
        return self._post(self._decode, path, body, self._timeout_s)

    def _post(
        self, servers: "_Turns", path: str, body: Mapping[str, Any], seconds: float
    ) -> http.client.HTTPResponse:
        """Return the answer of the first server that can be reached. seconds: that it may be
        silent; where it is for longer, no other is asked.
        """
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data, error = json.dumps(body).encode(), OSError("no server")
        for server in servers.next():
            request = urllib.request.Request(server + path, data, headers, method="POST")
            try:
                return _OPENER.open(request, timeout=seconds)
            except urllib.error.HTTPError:
                raise
            except TimeoutError:
                servers.failed(server)
                raise
            except http.client.HTTPException as e:
                error = ConnectionError(f"{server} answers no HTTP: {e!r}")
                servers.failed(server)
            except OSError as e:
                error = e
                servers.failed(server)
        raise error


def prompt_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body that has the prompt of another computed, and one token that is not used."""
    kept = {name: value for name, value in body.items() if name not in ANSWER_ONLY}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = 1
    return kept | {"max_tokens": 1, "n": 1, "temperature": 0}


class _Http(http.client.HTTPConnection):
    """Waits less long for a connection than for an answer."""

    def connect(self) -> None:
        seconds = self.timeout or CONNECT_S
        self.timeout = min(CONNECT_S, seconds)
        super().connect()
        self.sock.settimeout(seconds)


class _Https(http.client.HTTPSConnection, _Http):
    """The same over TLS."""


class _Handler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, req)


_OPENER = urllib.request.build_opener(_Handler)


class _Turns:
    """Addresses that take turns; those that failed of late come last."""

    def __init__(self, servers: Sequence[str]):
        for server in servers:
            parts = urllib.parse.urlsplit(server)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"server {server!r}: must be http://HOST:PORT")
        self._servers = [server.rstrip("/") for server in servers]
        self._count, self._lock = itertools.count(), threading.Lock()
        self._down_until: dict[str, float] = {}

    def next(self) -> list[str]:
        """Return all of them, the one whose turn it is first."""
        with self._lock:
            first = next(self._count) % len(self._servers)
        now, order = time.monotonic(), self._servers[first:] + self._servers[:first]
        return sorted(order, key=lambda server: self._down_until.get(server, 0.0) > now)

    def failed(self, server: str) -> None:
        """Ask the others first for a while."""
        self._down_until[server] = time.monotonic() + DOWN_S
