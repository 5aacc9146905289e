"""A batch run over several processes that share one model: the first process reads the input and
writes the answers, and the others do what its engine does.
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
IDLE_SHARE = 0.25  # of peer_timeout_s: an idle run sends the others a message this often


def run_together(
    args: Any,
    run: Callable[[Any], int],
    make_llm: Callable[[Any], Any],
    served_of: Callable[[Any], Mapping[str, Any]],
) -> int:
    """Run `run` in the first process, and its engine's work in the others. Return the exit status.

    args: of serve_batch. served_of: returns what a process would serve, which must be equal in all.
    Raises BatchError if another process has died or serves something else.
    """
    process = (args.coordinator, args.num_processes, args.process_id)
    # JAX ends this process if another is silent for this long: later than we do, with a message.
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
    """Raise BatchError, in every process, if the processes would serve different models or
    settings: the manifest has those of the first process only, and each process reads its own disk.
    """
    difference = first_difference(jpaged.broadcast(served), served)
    # The minimum over all processes: 0 if any differs.
    if least(int(difference is None)):
        return
    if difference is None:
        raise BatchError("another process serves another model or other settings: see its error")
    name, first, here = difference
    raise BatchError(
        f"the processes differ: {name} is {first} in the first process, and {here} in this one"
    )


@contextlib.contextmanager
def leading() -> Iterator[Callable[[Any], "Leading"]]:
    """Yield a function that wraps an LLM such that the other processes follow it, until the block
    ends.
    """
    made: list[Leading] = []

    def lead(llm: Any) -> Leading:
        made.append(Leading(llm))
        return made[-1]

    try:
        yield lead
    except BaseException as e:
        if not isinstance(e.__cause__, PeerError):  # otherwise there is no process left to inform
            for llm in made:
                llm.dismiss()
        raise
    for llm in made:
        llm.dismiss()


class Leading:
    """The LLM of the first process: calls that change it are sent to the other processes before its
    next step.
    """

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
        """See LLM. While the run waits for its input, this also tells the others that the run is
        alive.
        """
        if time.monotonic() - self._sent > self._idle_s:
            self._send()
        return self._llm.stats()

    def dismiss(self) -> None:
        """Tell the other processes to end."""
        self._orders.append(("end", (), {}))
        self._send()

    def _send(self) -> None:
        orders, self._orders, self._sent = self._orders, [], time.monotonic()
        self._peers.call(lambda: jpaged.broadcast(orders), "sending orders")


def follow(llm: Any) -> None:
    """Do what the first process says, until it says that the run has ended. Raises PeerError."""
    peers: Peers = llm.session.runner.peers
    while True:
        for name, args, settings in peers.call(jpaged.broadcast, "waiting for orders"):
            if name == "end":
                return
            try:
                getattr(llm, name)(*args, **settings)
            except JpagedError as e:
                # The error of a single request: the first process has it too, and answers it.
                if isinstance(e, PeerError):
                    raise
