"""Router: which replica takes a request."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from jpaged.engine.cache.contents import chain_hash
from jpaged.engine.cache.prefix_cache import PrefixCache
from jpaged.engine.sequence import Request

# A replica may have so much more to do than the mean and still be given what it has the prefix of.
SLACK = 1.25


class Router:
    """Sends requests with equal prefixes to one replica, unless others have far less to do.

    What a replica has to do is the tokens of its unfinished requests at full length. cache: tells
    prefixes by their hashes. remembered: how many blocks of prompts it knows the place of.
    """

    def __init__(self, replicas: int, cache: PrefixCache, *, remembered: int):
        self.loads = [0] * replicas
        self.cache = cache
        self.remembered = remembered
        self._placed: dict[str, tuple[int, int]] = {}  # by request, its replica and its tokens
        # Who has a block's prefix, by the hash of their chain; used longest ago first.
        self._holders: OrderedDict[int, int] = OrderedDict()

    def place(self, request: Request) -> int:
        """Choose the replica that takes a request, and count it there until `leave`."""
        replica = 0 if len(self.loads) == 1 else self._choose(request)
        self._enter(request, replica)
        return replica

    def replica_of(self, request: Request) -> int:
        """Return the replica that a request was placed at."""
        return self._placed[request.request_id][0]

    def leave(self, request: Request) -> None:
        """Count a request no longer."""
        replica, tokens = self._placed.pop(request.request_id)
        self.loads[replica] -= tokens

    def keep(self, requests: Iterable[Request]) -> None:
        """Count these requests, at the replicas where they were placed, and no others."""
        self.restore(requests, {key: replica for key, (replica, _) in self._placed.items()})

    def restore(self, requests: Iterable[Request], placed: Mapping[str, int]) -> None:
        """Count these requests, at the replicas that `placed` has by their ids, and no others."""
        self.loads = [0] * len(self.loads)
        self._placed.clear()
        for request in requests:
            # An interrupt may have fallen between a request's entry and its placing.
            self._enter(request, placed.get(request.request_id, 0))

    def _enter(self, request: Request, replica: int) -> None:
        tokens = request.max_sequences * request.sequences[0].end
        self._placed[request.request_id] = (replica, tokens)
        self.loads[replica] += tokens

    def _choose(self, request: Request) -> int:
        """Return the replica that was last given the longest prefix of the prompt, where what is
        saved by that is worth the wait; else the one with the least to do.
        """
        seq, size = request.sequences[0], self.cache.block_size
        blocks = (seq.prompt_len - 1) // size if self.cache.is_on else 0
        hashes = [chain_hash(seq, i, size) for i in range(blocks)]
        known = [i for i, key in enumerate(hashes) if key in self._holders]
        chosen = self.loads.index(min(self.loads))
        if known:
            holder, saved = self._holders[hashes[known[-1]]], size * (known[-1] + 1)
            if self.loads[holder] <= SLACK * sum(self.loads) / len(self.loads) + saved:
                chosen = holder
        for key in hashes:
            self._holders[key] = chosen
            self._holders.move_to_end(key)
        while len(self._holders) > self.remembered:
            self._holders.popitem(last=False)
        return chosen
