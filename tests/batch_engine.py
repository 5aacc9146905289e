"""An engine that keeps LLM's contract for batch runs and answers at once, and a command that runs
serve_batch on it.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jpaged.config import EngineConfig
from jpaged.errors import CapacityError, GenerationError, RequestError
from jpaged.integrations.batch import command
from jpaged.request.outputs import CompletionOutput, RequestOutput
from jpaged.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]
CONTEXT = 64
# For what only a process of its own can show.
DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's child has it ignored
from jpaged.integrations.batch import command
from tests.batch_engine import FakeLLM
delay = float(sys.argv.pop(1))
command.make_llm = lambda args: FakeLLM(delay=delay)
sys.exit(command.main())
"""


def start(*argv: Any, delay: float = 0.0, terminal: Any = subprocess.PIPE, **pipes: Any) -> Any:
    """serve_batch on a FakeLLM, in a process of its own; delay: seconds a step; terminal: its
    stderr.
    """
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-c", DRIVER, str(delay), *map(str, argv)]
    return subprocess.Popen(
        command, env=env | {"JAX_PLATFORMS": "cpu"}, cwd=ROOT, stderr=terminal, **pipes
    )


def serve(*argv: Any, llm: Any = None) -> int:
    """serve_batch on an engine of this process; its exit status."""
    with mock.patch.object(command, "make_llm", lambda args: llm or FakeLLM()):
        return command.main([str(a) for a in argv])


def peak_memory() -> int:
    """Bytes of this process at its largest. Not getrusage's: that counts what the parent held at
    the fork.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


class FakeLLM:
    """Answers each prompt with itself in capitals, the youngest of the running requests first; a
    byte is a token.
    """

    engine_config = EngineConfig(max_model_len=CONTEXT)

    def __init__(
        self, *, delay=0.0, fail_at=None, fail_prompt=None, with_seed=False, at_once=False
    ):
        self.waiting: dict = {}
        self.at_once = at_once  # answer all that waits in a step, and remember nothing
        self.added: Counter[str] = Counter()  # by request id
        self.conversations: list = []  # that render_chat was given, with how
        self.delay, self.fail_at, self.fail_prompt, self.with_seed = (
            delay,
            fail_at,
            fail_prompt,
            with_seed,
        )
        self.steps = self.most_waiting = 0

    @property
    def tokenizer(self):
        return type("Tokenizer", (), {"encode": staticmethod(lambda text: list(text.encode()))})

    def default_sampling_params(self):
        return SamplingParams(temperature=0.5)

    def render_chat(
        self,
        messages,
        chat_template_kwargs=None,
        add_generation_prompt=True,
        continue_final_message=False,
    ):
        self.conversations.append((messages, chat_template_kwargs))
        if messages[0]["role"] == "system":
            raise RequestError(
                "the tokenizer has no chat template: pass prompts, or a tokenizer that has one"
            )
        return list("|".join(m["content"] for m in messages).encode())

    def add_request(self, prompt, sampling_params: Any = None, *, request_id: Any = None):
        if isinstance(prompt, dict):
            prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        sampling_params.validate(EngineConfig(), vocab_size=256)
        if not ids:
            raise RequestError("the prompt is empty")
        if not all(0 <= token < 256 for token in ids):
            raise RequestError(f"prompt token ids {ids}: must be from 0 to 255")
        if len(ids) > CONTEXT:
            raise CapacityError(f"the prompt has {len(ids)} tokens, above max_model_len={CONTEXT}")
        assert request_id not in self.waiting
        self.waiting[request_id] = (ids, sampling_params)
        if not self.at_once:
            self.added[request_id] += 1
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        return request_id

    def abort(self, request_id):
        del self.waiting[request_id]

    def has_unfinished(self):
        return bool(self.waiting)

    def step(self):
        time.sleep(self.delay)
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the device is gone")
        return [self.answer() for _ in range(len(self.waiting) if self.at_once else 1)]

    def answer(self):
        request_id, (ids, params) = self.waiting.popitem()
        full = bytes(ids).decode(errors="replace").upper()
        text = f"{full} {params.seed}" if self.with_seed else None
        length = len(ids) if params.max_tokens is None else min(len(ids), params.max_tokens)
        reason = "length" if length < len(ids) else "stop"
        done = [
            CompletionOutput(
                index=i,
                text=text or full[:length],
                token_ids=ids[:length],
                cumulative_logprob=0.0,
                token_logprobs=np.zeros(length, np.float32),
                finish_reason=reason,
            )
            for i in range(params.n)
        ]
        error = GenerationError("out of blocks", []) if full == self.fail_prompt else None
        out = RequestOutput(
            request_id=request_id, prompt=None, prompt_token_ids=ids, outputs=done, error=error
        )
        out.num_cached_tokens = 2
        return out

    def stats(self):
        tokens = {"prefill_tokens": 10 * self.steps, "decode_tokens": 20 * self.steps}
        return tokens | {"num_compiles": 0, "preemptions": 0}
