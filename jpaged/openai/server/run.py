"""Serve a model over HTTP by OpenAI's API.

    jpaged serve Qwen/Qwen3-0.6B --port 8000        # also: python -m jpaged.openai MODEL
    JPAGED_API_KEY=... jpaged serve path/to/folder --host 0.0.0.0 --max-num-seqs 64

On SIGTERM or SIGINT it finishes the running requests, for at most --drain-s seconds, and stops; a
second signal stops it at once. docs/server.md describes routes, limits and metrics.
"""

import argparse
import contextlib
import ipaddress
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

from jpaged import gpu_share
from jpaged.adapter_flag import loaded
from jpaged.async_llm import AsyncLLM
from jpaged.errors import CheckpointError, ConfigError
from jpaged.flags import Parser, add_engine_groups, add_flags, engine_settings, given_settings
from jpaged.llm import LLM
from jpaged.openai.server.app import Server
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.wire import Connection

PROG = "jpaged serve"
KEY_VARIABLE = "JPAGED_API_KEY"
MOST_OF_A_HEAD = 65536
COMMON = (
    *("model", "--host", "--port", "--api-key", "--served-model-name", "--adapter", "--warmup"),
    *("--max-waiting", "--max-output-tokens", "--max-model-len", "--max-num-seqs"),
    *("--memory-utilization", "--dtype", "--quantization", "--kv-cache-dtype", "--speculative"),
    "--tensor-parallel-size",
)


class Listener(uvicorn.Server):
    """A uvicorn server that prints its address, and that a second signal stops at once."""

    def __init__(self, server: Server, host: str, port: int, *, quiet: bool = False):
        settings = server.settings
        protocol = type("OwnConnection", (Connection,), {"settings": settings})
        config = uvicorn.Config(
            server.app,
            host=host,
            port=port,
            http=protocol,
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            h11_max_incomplete_event_size=MOST_OF_A_HEAD,
        )
        super().__init__(config)
        self._said = None if quiet else settings.models[0]

    @property
    def port(self) -> int:
        """The port it listens on, once it has started."""
        return self.servers[0].sockets[0].getsockname()[1]

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as e:  # another process began to listen after the address was bound
            await self.lifespan.shutdown()
            raise ConfigError(cannot_listen(self.config.host, self.config.port, e)) from e
        if self.started and self._said is not None:
            host = self.config.host
            address = f"[{host}]" if ":" in host else host
            print(f"jpaged serves {self._said} at http://{address}:{self.port}", flush=True)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit, self.should_exit = self.should_exit, True
        if self.force_exit:
            # Otherwise what is cancelled now would be logged as failed, with tracebacks.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def make_parser(prog: str = PROG) -> Parser:
    """Return the parser of `jpaged serve`."""
    parser = Parser(prog=prog, description=__doc__, common=COMMON)
    what = "checkpoint folder, OWNER/NAME of the Hub, or jpaged-demo-hybrid (default: jpaged-demo)"
    parser.add_argument("model", help=what, nargs="?")
    group = parser.add_argument_group("server")
    add = group.add_argument
    address = "address to listen on; 0.0.0.0 is all addresses of this machine (default: 127.0.0.1)"
    add("--host", help=address, default="127.0.0.1")
    add(
        "--port",
        help="port to listen on; 0 takes a free one (default: 8000)",
        type=_port,
        default=8000,
    )
    keys = f"key that requests must carry; may be repeated (default: {KEY_VARIABLE}, else none)"
    add("--api-key", help=keys, action="append", metavar="KEY")
    names = "model name that requests may use; answers carry the first (default: the model's own)"
    add("--served-model-name", help=names, nargs="+", metavar="NAME")
    lora = "folder of a PEFT adapter, for requests whose model is NAME (default: none)"
    add("--adapter", help=lora, nargs="+", metavar="NAME=FOLDER")
    hosts = "Host header to accept where there is no key, beside this machine's names; * is any"
    add("--allowed-host", help=hosts, nargs="+", metavar="HOST", default=[])
    seed = "seed of requests without one, together with their number (default: 0)"
    add("--seed", help=seed, type=int, default=0)
    early = "compile all step shapes before listening (default: off)"
    add("--warmup", help=early, action=argparse.BooleanOptionalAction, default=False)
    add_flags(parser.add_argument_group("limits and behaviour"), ServerSettings)
    add_engine_groups(parser)
    return parser


def name_of(model: str | None) -> str:
    if model is None:
        return "jpaged-demo"
    return Path(model).resolve().name if os.path.isdir(model) else model


def _port(text: str) -> int:
    if not 0 <= (port := int(text)) < 65536:
        raise argparse.ArgumentTypeError(f"{port} is not a port: it must be from 0 to 65535")
    return port


def cannot_listen(host: str, port: int, error: OSError) -> str:
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


def take_address(host: str, port: int) -> list[socket.socket]:
    """Return sockets that are bound to every address of a host, so that an address in use is found
    before the model is loaded. They listen later. Raises ConfigError if an address is in use, or
    does not belong to this machine.
    """
    with contextlib.ExitStack() as stack:
        try:
            passive = socket.AI_PASSIVE
            infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=passive)
            if port == 0:
                del infos[1:]  # each address would get a different free port
            sockets = [
                stack.enter_context(_bound(*which)) for which in dict.fromkeys(map(_address, infos))
            ]
        except OSError as e:
            raise ConfigError(cannot_listen(host, port, e)) from e
        stack.pop_all()
        return sockets


def _address(info: Any) -> tuple[int, Any]:
    family, _, _, _, address = info
    return family, address


def _bound(family: int, address: Any) -> socket.socket:
    """Return a socket bound to an address on which nobody listens."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def make_server(args: argparse.Namespace) -> Server:
    """Load the model and return its server. Raises ConfigError and CheckpointError."""
    key = os.environ.get(KEY_VARIABLE)
    keys = args.api_key or ([key] if key else [])
    settings = ServerSettings(
        models=tuple(args.served_model_name or [name_of(args.model)]),
        api_keys=tuple(keys),
        hosts=(args.host, *args.allowed_host),
        **given_settings(args, ServerSettings),
    )
    if not keys and not _is_local(args.host):
        said = f"no --api-key: anybody who can reach {args.host}:{args.port} is served"
        print(f"jpaged serve: {said}", file=sys.stderr, flush=True)
    model = args.model
    if model is None:
        from jpaged.demo import MODEL_PATH

        model = str(MODEL_PATH)
    llm = loaded(LLM(model, seed=args.seed, **engine_settings(args)), args.adapter)
    if args.warmup:
        llm.warmup()
    return Server(AsyncLLM(llm), settings)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(argv: list[str] | None = None, prog: str = PROG) -> int:
    """Serve until a signal. Returns the exit status: 0, 1 after one sentence on stderr, or 130 if
    Ctrl-C came before it listened.
    """
    args = make_parser(prog).parse_args(argv)
    gpu_share.take_most()
    sockets: list[socket.socket] = []
    try:
        sockets = take_address(args.host, args.port)
        server = make_server(args)
        Listener(server, args.host, args.port).run(sockets)
    except (ConfigError, CheckpointError) as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        for taken in sockets:
            taken.close()
    return 0
