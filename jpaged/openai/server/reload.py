"""Reload: takes new keys, adapters and certificates from their files while a server runs, on SIGHUP
and when a file has changed.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged.errors import ConfigError, JpagedError
from jpaged.openai.server.app import Server

log = logging.getLogger("jpaged")

Signature = tuple[tuple[str, int, int], ...]  # path, time of change and size of files


def read_keys(path: str) -> tuple[str, ...]:
    """Return the keys of a file, one a line; blank lines and those that begin with # are none.
    Raises ConfigError if it cannot be read, or has none: that would open the server to everybody.
    """
    keys = tuple(dict.fromkeys(_lines(path, "--api-key-file")))
    if not keys:
        raise ConfigError(f"--api-key-file {path}: has no key")
    return keys


def read_adapters(path: str) -> dict[str, str]:
    """Return the folders by name of a file with lines NAME=FOLDER; a relative folder is below the
    file's. Raises ConfigError.
    """
    named: dict[str, str] = {}
    for line in _lines(path, "--adapter-file"):
        name, _, folder = (part.strip() for part in line.partition("="))
        folder = str(Path(path).parent / folder) if folder else ""
        if not name or not folder or not Path(folder).is_dir():
            raise ConfigError(f"--adapter-file {path}: {line!r} is no NAME=FOLDER that exists")
        if name in named:
            raise ConfigError(f"--adapter-file {path}: {name!r} stands there twice")
        named[name] = folder
    return named


def _lines(path: str, flag: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{flag} {path}: {getattr(e, 'strerror', None) or e}") from e
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def signature(*paths: str) -> Signature:
    """Return what changes when files do; of a folder, those in it. A missing file has none."""
    entries: list[tuple[str, int, int]] = []
    for path in paths:
        names = sorted(os.listdir(path)) if os.path.isdir(path) else [None]
        for name in names:
            file = path if name is None else os.path.join(path, name)
            try:
                facts = os.stat(file)
            except OSError:
                continue
            entries.append((file, facts.st_mtime_ns, facts.st_size))
    return tuple(entries)


class Reload:
    """Watches the files of a server.

    keys, key_file: the keys of the command line, to which those of the file are added. adapters:
    the folders by name that were read from adapter_file and are loaded. certificates: certificate
    and key of TLS, which `context` has. every_s: how often the files are looked at.
    """

    def __init__(
        self,
        server: Server,
        *,
        keys: Sequence[str] = (),
        key_file: str | None = None,
        adapter_file: str | None = None,
        adapters: Mapping[str, str] | None = None,
        certificates: tuple[str, str | None] | None = None,
        every_s: float = 5.0,
    ):
        self._server, self._keys, self._every_s = server, tuple(keys), every_s
        self._key_file, self._adapter_file = key_file, adapter_file
        self._certificates = certificates
        self.context: ssl.SSLContext | None = None
        self._asked = asyncio.Event()
        self._loaded = {
            name: (folder, signature(folder)) for name, folder in (adapters or {}).items()
        }
        self._parts: dict[str, Callable[[], Any]] = {}
        if key_file is not None:
            self._parts["keys"] = self._reload_keys
        if adapter_file is not None:
            self._parts["adapters"] = self._reload_adapters
        if certificates is not None:
            self._parts["certificates"] = self._reload_certificates
        self._seen = {part: self._signature(part) for part in self._parts}

    def ask(self) -> None:
        """Have everything read again, changed or not. Called in the event loop, by SIGHUP."""
        self._asked.set()

    async def run(self) -> None:
        """Watch until the task is cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._every_s):
                    await self._asked.wait()
            except TimeoutError:
                pass
            is_asked = self._asked.is_set()
            self._asked.clear()
            for part in self._parts:
                await self._look(part, is_asked=is_asked)

    async def _look(self, part: str, *, is_asked: bool) -> None:
        """Reload a part if its files have changed, or if that is asked for. An error is logged, and
        what there was stays.
        """
        now = self._signature(part)
        if now == self._seen[part] and not is_asked:
            return
        self._seen[part] = now
        try:
            what = await self._parts[part]()
        except (JpagedError, OSError, ssl.SSLError) as e:
            log.error("%s were not reloaded: %s", part, e)
        else:
            log.warning("%s were reloaded: %s", part, what)

    def _signature(self, part: str) -> Signature:
        if part == "keys":
            return signature(str(self._key_file))
        if part == "certificates":
            assert self._certificates is not None
            return signature(*filter(None, self._certificates))
        folders = (folder for folder, _ in self._loaded.values())
        return signature(str(self._adapter_file), *folders)

    async def _reload_keys(self) -> str:
        keys = (*self._keys, *read_keys(str(self._key_file)))
        self._server.set_keys(tuple(dict.fromkeys(keys)))
        return f"{len(self._server.settings.api_keys)} keys"

    async def _reload_certificates(self) -> str:
        """Read the files into the context, which new connections use."""
        assert self._certificates is not None and self.context is not None
        certificate, key = self._certificates
        # A pair that does not match leaves a context half changed, so another one tries it first.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        self.context.load_cert_chain(certificate, key)
        return certificate

    async def _reload_adapters(self) -> str:
        """Add the adapters that are new or have changed, and remove those that stand no more in the
        file. One that cannot be loaded ends it, and those before it stay.
        """
        file = signature(str(self._adapter_file))
        llm, named = self._server.llm, read_adapters(str(self._adapter_file))
        for name in set(self._loaded) - set(named):
            await llm.remove_adapter(name)
            del self._loaded[name]
        for name, folder in named.items():
            loaded = (folder, signature(folder))
            if self._loaded.get(name) != loaded:
                await llm.add_adapter(name, folder)
                self._loaded[name] = loaded
        # As they were when they were read: what has changed since then is seen at the next look.
        folders = [entry for _, entries in self._loaded.values() for entry in entries]
        self._seen["adapters"] = (*file, *folders)
        return ", ".join(named) or "none"
