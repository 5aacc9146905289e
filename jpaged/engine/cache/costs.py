"""Costs: whether a prefix is sooner fetched or computed, by what was measured while running."""

from jpaged.engine.types import Report

DECAY = 0.95  # of what was measured before, at each new measurement
LOOK_AGAIN = 32  # of so many fetches that seem dear one is made: what they cost may have changed


class Rate:
    """How much a second passed, of late."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Count what took so long."""
        self._amount = self._amount * DECAY + amount
        self._seconds = self._seconds * DECAY + max(seconds, 0.0)

    @property
    def per_second(self) -> float | None:
        """The rate; None until anything was measured."""
        return self._amount / self._seconds if self._seconds > 0 and self._amount > 0 else None

    def seconds(self, amount: float) -> float | None:
        """Return how long so much takes; None where that is not known."""
        rate = self.per_second
        return None if rate is None else amount / rate


class BestRate(Rate):
    """The best of late: of what is sometimes held up, by a compile say."""

    def add(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            before = self.per_second or 0.0
            self._amount, self._seconds = max(amount / seconds, before * DECAY), 1.0


class Costs:
    """What a token of a prompt costs to compute, and a byte to fetch. Measured: tokens of prefills
    a second, bytes that are read from files a second while any are read, and bytes that are written
    from host memory into the pools. declined: fetches that would have taken longer than computing.
    """

    def __init__(self) -> None:
        self.prefill, self.disk, self.host = Rate(), Rate(), BestRate()
        self.declined = 0

    def __deepcopy__(self, memo: dict[int, object]) -> "Costs":
        return self  # a snapshot shares what is known of the machine

    def fetch_seconds(self, disk_bytes: int, host_bytes: int, queued_bytes: int = 0) -> float:
        """Return how long it takes until so many bytes are in the pools, as far as that is known.
        queued_bytes: what is read before them.
        """
        read = self.disk.seconds(disk_bytes + queued_bytes) if disk_bytes else 0.0
        return (read or 0.0) + (self.host.seconds(host_bytes) or 0.0)

    def is_worth(
        self, num_tokens: int, *, disk_bytes: int, host_bytes: int, queued_bytes: int = 0
    ) -> bool:
        """Return whether fetching the KV of so many tokens is sooner done than computing it. What
        was never measured counts as free to fetch.
        """
        computed = self.prefill.seconds(num_tokens)
        if computed is None or self.fetch_seconds(disk_bytes, host_bytes, queued_bytes) <= computed:
            return True
        self.declined += 1
        return self.declined % LOOK_AGAIN == 0

    def report(self) -> Report:
        """Return what was measured; 0.0 where nothing was."""
        return {
            "prefill_tokens_per_s": self.prefill.per_second or 0.0,
            "store_read_bytes_per_s": self.disk.per_second or 0.0,
            "store_load_bytes_per_s": self.host.per_second or 0.0,
            "store_declined": self.declined,
        }
