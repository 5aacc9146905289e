"""Which adapters lie in the slots of the device's tables, and whose rows need them there."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(eq=False, frozen=True, kw_only=True)
class AdapterVersion:
    """Holds the weights that were passed under a name, or for one call (None). version: counts all
    of an engine's adapters, so that no two have one. rank: the largest of its pairs. data: the
    runtime's, on the host. digest_of: returns what names such data in every process, 32 bytes.
    shared_salt: 8 bytes in place of the version's in `salt`, which several engines have agreed on;
    who does so sees to it that no other weights have them.
    """

    name: str | None
    version: int
    rank: int
    data: Any = dataclasses.field(repr=False)
    digest_of: Callable[[Any], bytes] | None = dataclasses.field(default=None, repr=False)
    shared_salt: bytes | None = None

    def __deepcopy__(self, memo: Mapping[int, object]) -> "AdapterVersion":
        return self  # never changed: a snapshot shares it

    @property
    def salt(self) -> bytes:
        """What cached blocks under it begin with; no caller's salt can hold it."""
        return b"\0" + (self.shared_salt or self.version.to_bytes(8, "little"))

    @functools.cached_property
    def digest(self) -> bytes | None:
        """What names its weights in every process; None where nothing does."""
        return None if self.digest_of is None else self.digest_of(self.data)


# What is to be written into the tables before a step: slots and what comes there.
Loads = tuple[tuple[int, AdapterVersion], ...]


class AdapterSlots:
    """The slots of one engine: an adapter stays in one while any running row uses it, and after
    that until another needs the slot; the one that was used least recently goes first.
    """

    def __init__(self, count: int):
        self.count = count
        self.places: dict[AdapterVersion, int] = {}  # least recently used first
        self.users: dict[AdapterVersion, int] = {}  # running rows of each that has any
        self.loads: dict[int, AdapterVersion] = {}  # to be written before the next step, by slot

    def has_room(self, adapter: AdapterVersion) -> bool:
        """Return whether a row with this adapter can run now."""
        return adapter in self.places or len(self.users) < self.count

    def take(self, adapter: AdapterVersion) -> int:
        """Return the slot of a row that begins to run, which `has_room` allows."""
        slot = self.places.pop(adapter, None)
        if slot is None:
            slot = self._free_slot()
            self.loads[slot] = adapter
        self.places[adapter] = slot
        self.users[adapter] = self.users.get(adapter, 0) + 1
        return slot

    def leave(self, adapter: AdapterVersion) -> None:
        """Count a row with this adapter less."""
        self.users[adapter] -= 1
        if not self.users[adapter]:
            del self.users[adapter]

    def take_loads(self) -> Loads:
        """Return what must be written before the next step, which goes out with it."""
        loads = tuple(self.loads.items())
        self.loads.clear()
        return loads

    def load_again(self) -> None:
        """Take the tables for empty: what running rows use comes back now, the rest when used."""
        self.places = {a: slot for a, slot in self.places.items() if a in self.users}
        self.loads = {slot: adapter for adapter, slot in self.places.items()}

    def _free_slot(self) -> int:
        if len(self.places) < self.count:
            return min(set(range(self.count)) - set(self.places.values()))
        return self.places.pop(next(a for a in self.places if a not in self.users))
