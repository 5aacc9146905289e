"""Parties: tells the clients of a server apart, to share its capacity fairly and to isolate cached
prefixes.
"""

import dataclasses
import hashlib
import hmac
import ipaddress
import secrets

from jpaged.engine.cache.wire import secret_of_environment
from jpaged.openai.server.settings import ServerSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Party:
    """A client of a server, or all clients that share a key.

    name: does not reveal the key or address that it stands for. salt: of its cached prefixes, None
    if all parties share them. is_known: whether it is one of several keys, for each of which a part
    of the server is reserved.
    """

    name: str
    salt: str | None
    is_known: bool

    @property
    def shared(self) -> str:
        """The name of all that may see what is kept for this client: those with its key, or
        everybody if keys tell nobody apart. Addresses do not count, since they change.
        """
        return self.name if self.is_known else ""


class Parties:
    """The parties of a server: its keys if it has several, otherwise the addresses of clients.

    Names are keyed digests under a secret of this process, or of all that share a block server's.
    So neither a log nor a client can infer a key from a name, no client can choose the salt of
    another, and what a key's requests have computed is found by servers that share a prefix store.
    """

    def __init__(self, settings: ServerSettings):
        shared = secret_of_environment()
        self._secret = (
            hmac.digest(shared, b"parties", "sha256") if shared else secrets.token_bytes(32)
        )
        self._shares = settings.share_prefix_cache
        self.set_keys(settings)

    def set_keys(self, settings: ServerSettings) -> None:
        """Take other keys from now on; a key that stays is the same party."""
        self._by_key = len(set(settings.api_keys)) > 1

    def of(self, key: str | None, address: str | None) -> Party:
        """Return the party of a request with this key, from this address."""
        if self._by_key and key is not None:
            name = self._digest(f"key {key}")
            return Party(name=name, salt=None if self._shares else name, is_known=True)
        return Party(name=self._digest(f"address {_network(address)}"), salt=None, is_known=False)

    def _digest(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), key=self._secret, digest_size=16).hexdigest()


def _network(address: str | None) -> str:
    """Return the range of addresses that one client has: a single IPv4 address, or an IPv6 network
    of /64.
    """
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return address or ""
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((int(parsed), 64), strict=False))
    return str(parsed)
