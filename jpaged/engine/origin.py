"""Origin: who asked for a request, by which an engine is shared fairly."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Who asked for a request. Parties share the engine fairly, and so do the calls of a party.

    party: such as a key of a server, or a client's address. call: such as one HTTP request, which
    may have many prompts. None: nobody said who asked. leaves_rows: whether the party as a whole
    leaves the reserved rows to other parties. session: requests of one are likely to begin alike,
    so that a fleet runs them at one replica; an engine does not look at it.
    """

    party: str | None = None
    call: str | None = None
    leaves_rows: bool = False
    session: str | None = None


NOBODY = Origin()
