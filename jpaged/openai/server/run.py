"""Serve a model over HTTP by OpenAI's API.

    jpaged serve Qwen/Qwen3-0.6B --port 8000        # also: python -m jpaged.openai MODEL
    JPAGED_API_KEY=... jpaged serve path/to/folder --host 0.0.0.0 --max-num-seqs 64

On SIGTERM or SIGINT it finishes the running requests, for at most --drain-s seconds, and stops; a
second signal stops it at once. docs/server.md describes routes, limits and metrics.
"""

import argparse
import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import uvicorn

from jpaged import gpu_share
from jpaged.adapter_flag import folders, loaded
from jpaged.async_llm import AsyncLLM
from jpaged.errors import ConfigError, JpagedError
from jpaged.flags import (
    Parser,
    add_engine_groups,
    add_flags,
    engine_settings,
    given_settings,
    parse_resources,
)
from jpaged.fleet.face import FleetLLM
from jpaged.fleet.router import POLICIES, RouterSettings
from jpaged.llm import LLM
from jpaged.openai.server import logs
from jpaged.openai.server.app import Server
from jpaged.openai.server.record import Observer
from jpaged.openai.server.reload import Reload, read_adapters, read_keys
from jpaged.openai.server.settings import ServerSettings
from jpaged.openai.server.wire import Connection

PROG = "jpaged serve"
KEY_VARIABLE = "JPAGED_API_KEY"
FLEET_FLAGS = {
    "--min-replicas": "min_replicas",
    "--max-replicas": "max_replicas",
    "--ray": "ray",
    "--replica-resources": "replica_resources",
    "--replica-retries": "replica_retries",
    "--router": "router",
    "--max-imbalance": "max_imbalance",
}
MOST_OF_A_HEAD = 65536
COMMON = (
    *("model", "--host", "--port", "--api-key", "--served-model-name", "--adapter", "--warmup"),
    *("--max-waiting", "--max-output-tokens", "--max-model-len", "--max-num-seqs"),
    *("--memory-utilization", "--dtype", "--quantization", "--kv-cache-dtype", "--speculative"),
    "--tensor-parallel-size",
)


class Listener(uvicorn.Server):
    """A uvicorn server that prints its address, and that a second signal stops at once.

    tls: the files of its certificate and its key. uds: the path of the Unix socket that it listens
    on in place of the address. reload: takes changed files while it runs, and on SIGHUP.
    """

    def __init__(
        self,
        server: Server,
        host: str,
        port: int,
        *,
        quiet: bool = False,
        tls: tuple[str, str | None] | None = None,
        uds: str | None = None,
        reload: Reload | None = None,
    ):
        settings = server.settings
        protocol = type("OwnConnection", (Connection,), {"settings": settings})
        certificate, key = tls or (None, None)
        config = uvicorn.Config(
            server.app,
            host=host,
            port=port,
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            h11_max_incomplete_event_size=MOST_OF_A_HEAD,
        )
        super().__init__(config)
        self._server = server
        self._said = None if quiet else settings.models[0]
        self._uds, self._reload = uds, reload
        self._watching: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on, once it has started."""
        return self.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """Where it listens, once it has started."""
        if self._uds is not None:
            return f"unix:{self._uds}"
        host = self.config.host
        address = f"[{host}]" if ":" in host else host
        return f"{'https' if self.config.is_ssl else 'http'}://{address}:{self.port}"

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as e:  # another process began to listen after the address was bound
            await self.lifespan.shutdown()
            address = self._uds or f"{self.config.host}:{self.config.port}"
            raise ConfigError(cannot_listen(address, e)) from e
        if not self.started:
            return
        if self._reload is not None:
            self._reload.context = self.config.ssl
            self._watching = asyncio.ensure_future(self._reload.run())
            if threading.current_thread() is threading.main_thread():
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGHUP, self._reload.ask)
        if self._said is not None:
            print(f"jpaged serves {self._said} at {self.url}", flush=True)
        notify("READY=1")

    async def shutdown(self, sockets: Any = None) -> None:
        notify("STOPPING=1")
        if self._watching is not None:
            self._watching.cancel()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit, self.should_exit = self.should_exit, True
        self._server.is_stopping = True
        if self.force_exit:
            # Otherwise what is cancelled now would be logged as failed, with tracebacks.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def notify(state: str) -> None:
    """Tell systemd the state of this service, if it started the process as one of Type=notify."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(address)
            sender.sendall(state.encode())
        except OSError as e:
            logging.getLogger("jpaged").warning("systemd was not told %s: %s", state, e)


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
    held = "file with a key a line, read again on SIGHUP and when it has changed (default: none)"
    add("--api-key-file", help=held, metavar="FILE")
    add("--served-model-name", help=names, nargs="+", metavar="NAME")
    lora = "folder of a PEFT adapter, for requests whose model is NAME (default: none)"
    add("--adapter", help=lora, nargs="+", metavar="NAME=FOLDER")
    loras = (
        "file of lines NAME=FOLDER, read again as that of keys is; see --max-loras (default: none)"
    )
    add("--adapter-file", help=loras, metavar="FILE")
    hosts = "Host header to accept where there is no key, beside this machine's names; * is any"
    add("--allowed-host", help=hosts, nargs="+", metavar="HOST", default=[])
    sites = "origin of pages that browsers may let use this server, or * (default: none)"
    add("--allowed-origin", help=sites, nargs="+", metavar="ORIGIN", default=[])
    add(
        "--uds",
        help="Unix socket to listen on, in place of an address (default: none)",
        metavar="PATH",
    )
    certificate = "file of a certificate chain: the server speaks TLS (default: none)"
    add("--ssl-certfile", help=certificate, metavar="FILE")
    key = "file of its private key (default: it is in --ssl-certfile)"
    add("--ssl-keyfile", help=key, metavar="FILE")
    watched = (
        "seconds between two looks at the files of keys, adapters and certificates (default: 5)"
    )
    add("--reload-s", help=watched, type=_seconds, metavar="X", default=5.0)
    seed = "seed of requests without one, together with their number (default: 0)"
    add("--seed", help=seed, type=int, default=0)
    early = "compile all step shapes before listening (default: off)"
    add("--warmup", help=early, action=argparse.BooleanOptionalAction, default=False)
    add = parser.add_argument_group("fleet").add_argument
    count = "engines on a Ray cluster behind this server (default: one engine, without Ray)"
    add("--replicas", help=count, type=int, metavar="N")
    least = "let Ray Serve remove replicas down to so many where there is little to do"
    add("--min-replicas", help=f"{least} (default: --replicas)", type=int, metavar="N")
    most = "let Ray Serve add replicas up to so many where there is much to do"
    add("--max-replicas", help=f"{most} (default: --replicas)", type=int, metavar="N")
    cluster = "local starts Ray on this machine; auto, or HOST:PORT of a cluster (default: local)"
    add("--ray", help=cluster, metavar="ADDRESS")
    taken = "what Ray reserves for each replica, such as GPU=2 (default: as its devices need)"
    add("--replica-resources", help=taken, nargs="+", metavar="NAME=COUNT")
    retried = "times that a request is run again whose replica has died (default: 3)"
    add("--replica-retries", help=retried, type=int, metavar="N")
    policy = "which replica gets a request: docs/cluster.md (default: prefix)"
    add("--router", help=policy, choices=POLICIES)
    bound = "tokens by which a replica may be busier than others and still get what begins there"
    told = f"{bound} (default: {RouterSettings.max_imbalance})"
    add("--max-imbalance", help=told, type=int, metavar="N")
    add = parser.add_argument_group("logs and traces").add_argument
    lines = "a line for each request, without its text (default: off)"
    add("--access-log", help=lines, action=argparse.BooleanOptionalAction, default=False)
    forms = "form of every line of the log, which goes to stderr (default: text)"
    add("--log-format", help=forms, choices=get_args(logs.LogFormat), default="text")
    levels = "the least level of lines in the log, beside the access log (default: warning)"
    add("--log-level", help=levels, choices=get_args(logs.LogLevel), default="warning")
    spans = (
        "collector to send a trace of each request to, http://HOST:4318/v1/traces (default: none)"
    )
    add("--otlp-traces-endpoint", help=spans, metavar="URL")
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


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{seconds} is no time: it must be above 0")
    return seconds


def cannot_listen(address: str, error: OSError) -> str:
    return f"cannot listen on {address}: {error.strerror or error}"


@contextlib.contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """Bind a Unix socket, and remove it when the block ends. One that nobody listens on is
    replaced. Raises ConfigError if a server listens there, or another file has the name.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            if os.path.lexists(path):
                _remove_unused(path)
            bound.bind(path)
        except OSError as e:
            raise ConfigError(cannot_listen(path, e)) from e
        try:
            yield bound
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _remove_unused(path: str) -> None:
    """Remove a socket that nobody listens on. Raises OSError for anything else."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "it exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def tls_files(args: argparse.Namespace) -> tuple[str, str | None] | None:
    """Return the files of certificate and key, which can be used. Raises ConfigError."""
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return None
    files = (args.ssl_certfile, args.ssl_keyfile)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)
    except OSError as e:  # ssl.SSLError is one
        said = f"--ssl-certfile {files[0]}, --ssl-keyfile {files[1]}: {e.strerror or e}"
        raise ConfigError(said) from e
    return files


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
            raise ConfigError(cannot_listen(f"{host}:{port}", e)) from e
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


def make_server(args: argparse.Namespace, observers: Sequence[Observer] = ()) -> Server:
    """Load the model and return its server. Raises JpagedError."""
    keys = keys_of(args)
    if args.api_key_file is not None:
        keys = tuple(dict.fromkeys((*keys, *read_keys(args.api_key_file))))
    settings = ServerSettings(
        models=tuple(args.served_model_name or [name_of(args.model)]),
        api_keys=keys,
        hosts=(args.host, *args.allowed_host),
        origins=tuple(args.allowed_origin),
        **given_settings(args, ServerSettings),
    )
    if not keys and args.uds is None and not _is_local(args.host):
        said = f"no --api-key: anybody who can reach {args.host}:{args.port} is served"
        print(f"jpaged serve: {said}", file=sys.stderr, flush=True)
    model = args.model
    if model is None:
        from jpaged.demo import MODEL_PATH

        model = str(MODEL_PATH)
    adapters = adapters_of(args)
    if args.replicas is not None:
        return Server(fleet_of(args, model, adapters), settings, observers)
    if passed := [flag for flag, name in FLEET_FLAGS.items() if getattr(args, name) is not None]:
        raise ConfigError(f"{passed[0]} needs --replicas")
    llm = LLM(model, seed=args.seed, **engine_settings(args))
    llm = loaded(llm, [*(args.adapter or ()), *(f"{k}={v}" for k, v in adapters.items())])
    if args.warmup:
        llm.warmup()
    return Server(AsyncLLM(llm), settings, observers)


def fleet_of(args: argparse.Namespace, model: str, adapters: dict[str, str]) -> FleetLLM:
    """Start the replicas, and return their face. Raises ConfigError."""
    jax.config.update("jax_platforms", "cpu")  # the devices of this machine are the replicas'
    try:
        from jpaged.fleet.on_ray import start_fleet
    except ImportError as e:
        raise ConfigError(f"--replicas: {e}") from e
    resources = parse_resources(args.replica_resources or ())
    chosen = {"policy": args.router, "max_imbalance": args.max_imbalance}
    more = {"address": args.ray, "max_retries": args.replica_retries}
    return start_fleet(
        model,
        replicas=args.replicas,
        min_replicas=args.min_replicas,
        max_replicas=args.max_replicas,
        resources=resources or None,
        adapters={**folders(args.adapter), **adapters},
        router=RouterSettings(**{k: v for k, v in chosen.items() if v is not None}),
        seed=args.seed,
        warms_up=args.warmup,
        drain_s=args.drain_s if "drain_s" in args else ServerSettings.drain_s,
        **{k: v for k, v in more.items() if v is not None},
        **engine_settings(args),
    )


def keys_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of the command line, else of the environment."""
    key = os.environ.get(KEY_VARIABLE)
    return tuple(args.api_key or ([key] if key else []))


def adapters_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the folders by name that --adapter-file has. Raises ConfigError."""
    return {} if args.adapter_file is None else read_adapters(args.adapter_file)


@contextlib.contextmanager
def observing(args: argparse.Namespace) -> Iterator[list[Observer]]:
    """Yield what is called for each request that has ended: the access log and traces, as the flags
    say. Raises ConfigError.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(logs.written(args.log_format, args.log_level, access=args.access_log))
        observers: list[Observer] = [logs.log_access] if args.access_log else []
        if args.otlp_traces_endpoint is not None:
            from jpaged.openai.server.tracing import Tracing

            tracing = Tracing.to(args.otlp_traces_endpoint)
            observers.append(stack.enter_context(contextlib.closing(tracing)))
        yield observers


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
    if args.replicas is None:
        gpu_share.take_most()
    try:
        with contextlib.ExitStack() as stack:
            if args.uds is not None:
                sockets = [stack.enter_context(unix_socket(args.uds))]
            else:
                sockets = take_address(args.host, args.port)
                for taken in sockets:
                    stack.callback(taken.close)
            tls, observers = tls_files(args), stack.enter_context(observing(args))
            server = make_server(args, observers)
            reload = Reload(
                server,
                keys=keys_of(args),
                key_file=args.api_key_file,
                adapter_file=args.adapter_file,
                adapters=adapters_of(args),
                certificates=tls,
                every_s=args.reload_s,
            )
            listener = Listener(server, args.host, args.port, tls=tls, uds=args.uds, reload=reload)
            listener.run(sockets)
    except JpagedError as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
