"""A batch run over several processes that share one model: the first reads the input and writes the
answers, the others do what its engine does.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

import jpaged
from jpaged.config import EngineConfig
from jpaged.errors import JpagedError, PeerError
from jpaged.integrations.batch.manifest import first_difference
from jpaged.integrations.batch.source import BatchError
from jpaged.runtime.processes import Peers, least

Order = tuple[str, tuple[Any, ...], dict[str, Any]]
IDLE_SHARE = 0.25  # of peer_timeout_s: how long the others are left without any order


def run_together(
    args: Any,
    run: Callable[[Any], int],
    make_llm: Callable[[Any], Any],
    served_of: Callable[[Any], Mapping[str, Any]],
) -> int:
    """`run` in the first process, and in the others what its engine does; the exit status.

    args: of serve_batch. served_of: what a process would serve, which must be the same in all.
    BatchError where another process is gone, or serves something else.
    """
    process = (args.coordinator, args.num_processes, args.process_id)
    # JAX ends this process where another is silent for so long: after us, who say what there is.
    patience = float(args.engine.get("peer_timeout_s") or EngineConfig.peer_timeout_s)
    jax.distributed.initialize(*process, heartbeat_timeout_seconds=math.ceil(patience) + 100)
    replicas = args.engine.get("data_parallel_size") or 1
    args.engine.setdefault("tensor_parallel_size", jax.device_count() // replicas)
    check_alike(served_of(args))
    try:
        if jax.process_index() == 0:
            with leading() as args.lead:
                return run(args)
        follow(make_llm(args))
    except PeerError as e:
        raise BatchError(f"the run stopped: {e}") from e
    return 0


def check_alike(served: Mapping[str, Any]) -> None:
    """Raise BatchError, in every process, where the processes would serve different models or
    settings: only the first one's stand in the manifest, and each reads its own disk.
    """
    difference = first_difference(jpaged.broadcast(served), served)
    # The least of all: 0 where some process differs.
    if least(int(difference is None)):
        return
    if difference is None:
        raise BatchError("another process serves another model or other settings: its error says")
    name, first, here = difference
    raise BatchError(
        f"the processes do not serve the same: {name} is {first} in the first, {here} in this one"
    )


@contextlib.contextmanager
def leading() -> Iterator[Callable[[Any], "Leading"]]:
    """A function that makes an LLM one that the others follow, until the end of the block."""
    made: list[Leading] = []

    def lead(llm: Any) -> Leading:
        made.append(Leading(llm))
        return made[-1]

    try:
        yield lead
    except BaseException as e:
        if not isinstance(e.__cause__, PeerError):  # else there is nobody left to tell
            for llm in made:
                llm.dismiss()
        raise
    for llm in made:
        llm.dismiss()


class Leading:
    """The LLM of the first process: what changes it goes to the others before its next step."""

    def __init__(self, llm: Any):
        self._llm = llm
        self._orders: list[Order] = []
        self._peers: Peers = llm.session.runner.peers
        self._idle_s = IDLE_SHARE * llm.engine_config.peer_timeout_s
        self._sent = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def add_request(self, *args: Any, **settings: Any) -> str:
        """See LLM."""
        self._orders.append(("add_request", args, settings))
        return self._llm.add_request(*args, **settings)

    def abort(self, request_id: str) -> Any:
        """See LLM."""
        self._orders.append(("abort", (request_id,), {}))
        return self._llm.abort(request_id)

    def step(self) -> Any:
        """See LLM."""
        self._orders.append(("step", (), {}))
        self._send()
        return self._llm.step()

    def stats(self) -> dict[str, Any]:
        """See LLM. While the run waits for its input, the others hear that it is there."""
        if time.monotonic() - self._sent > self._idle_s:
            self._send()
        return self._llm.stats()

    def dismiss(self) -> None:
        """Let the others end."""
        self._orders.append(("end", (), {}))
        self._send()

    def _send(self) -> None:
        orders, self._orders, self._sent = self._orders, [], time.monotonic()
        self._peers.call(lambda: jpaged.broadcast(orders), "sending orders")


def follow(llm: Any) -> None:
    """Do as the first process says, until it says that this is the end. Raises PeerError."""
    peers: Peers = llm.session.runner.peers
    while True:
        for name, args, settings in peers.call(jpaged.broadcast, "waiting for orders"):
            if name == "end":
                return
            try:
                getattr(llm, name)(*args, **settings)
            except JpagedError as e:
                # Of one request: the first process has it too, and answers it.
                if isinstance(e, PeerError):
                    raise
