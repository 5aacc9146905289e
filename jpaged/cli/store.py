"""Keep prefixes for engines on several machines (docs/prefix_store.md).

    jpaged store --gib 64                                     # for engines of this machine
    JPAGED_STORE_SECRET=... jpaged store --listen 10.0.0.5:7400 --gib 200
    jpaged store --folder /var/cache/jpaged --gib 500         # in files

Engines find it as prefix_store="tcp://HOST:PORT". Beyond this machine both sides need the same
secret, in JPAGED_STORE_SECRET; blocks are not encrypted on their way. It runs until SIGTERM or
SIGINT.
"""

import argparse
import contextlib
import signal
import sys
import threading
from pathlib import Path

from jpaged.checks import store_address
from jpaged.engine.cache.block_files import BlockFiles, PackedBlocks
from jpaged.engine.cache.block_server import BlockMemory, BlockServer
from jpaged.engine.cache.wire import SECRET_VARIABLE, is_loopback, secret_of_environment
from jpaged.errors import ConfigError
from jpaged.flags import Parser

DEFAULT_PORT = 7400


def make_parser(prog: str = "jpaged store") -> Parser:
    """Return the parser of the command."""
    parser = Parser(prog=prog, description=__doc__)
    add = parser.add_argument
    add(
        "--listen",
        default=f"127.0.0.1:{DEFAULT_PORT}",
        metavar="HOST:PORT",
        help="default: %(default)s; port 0 is any that is free",
    )
    add("--gib", type=float, default=16.0, help="of blocks at most (default: %(default)s)")
    add("--folder", type=Path, help="for the blocks, which then outlive it; default: its memory")
    return parser


def main(argv: list[str] | None = None, prog: str = "jpaged store") -> int:
    """Serve until a signal; the exit status."""
    parser = make_parser(prog)
    args = parser.parse_args(argv)
    if not 0 < args.gib < 1 << 30:
        parser.error(f"--gib {args.gib}: must be a number of GiB above 0")
    host, port = _address(parser, args.listen)
    secret, size = secret_of_environment(), int(args.gib * 2**30)
    if not secret and not is_loopback(host):
        parser.error(f"--listen {args.listen}: beyond this machine it takes {SECRET_VARIABLE}")
    try:
        blocks: PackedBlocks
        blocks = BlockMemory(size) if args.folder is None else BlockFiles(args.folder, size)
        _allow_files()
        server = BlockServer(blocks, host, port, secret)
    except (OSError, ImportError) as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 1
    ends = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.set())
    shown = f"[{server.host}]" if ":" in server.host else server.host
    print(f"blocks at tcp://{shown}:{server.port}", flush=True)
    ends.wait()
    server.close()
    counts = server.counts.copy()  # threads count on
    told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    print(f"{blocks.used_bytes():,} bytes in use; {told or 'nothing was asked'}")
    return 0


def _allow_files() -> None:
    """Allow this process as many open files as the system lets it have: each connection is one, and
    many systems begin with 1,024.
    """
    import resource  # which Windows does not have

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _address(parser: argparse.ArgumentParser, text: str) -> tuple[str, int]:
    """Return the host and the port of --listen, of which 0 is one."""
    is_any = text.endswith(":0")
    try:
        address = store_address(f"tcp://{text[:-1]}1" if is_any else f"tcp://{text}")
    except ConfigError:
        address = None
    if address is None:
        parser.error(f"--listen {text}: must be HOST:PORT")
    return address[0], 0 if is_any else address[1]
