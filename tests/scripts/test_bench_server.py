"""bench_server: its client counts the pieces of a stream however they come."""

import argparse
import contextlib
import json
import socket

import pytest
from bench_server import DONE, PIECE, Stream

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
EVENT = PIECE + b': "cmpl-1", "choices": [{"text": "a"}]}\n\n'
ARGS = argparse.Namespace(output=3)


@pytest.mark.parametrize("size", [1, 7, 12, 40, 1000])
def test_pieces(size: int) -> None:
    raw = 3 * EVENT + DONE
    with socket.create_server(("127.0.0.1", 0)) as server:
        stream = Stream(ARGS, server.getsockname()[1], [5, 6])
        other, _ = server.accept()
        with contextlib.closing(stream.socket), other:
            head, _, body = other.recv(4096).partition(b"\r\n\r\n")
            assert head.startswith(b"POST /v1/completions") and json.loads(body)["stream"] is True
            other.sendall(HEAD)
            ends = [stream.read()]
            for at in range(0, len(raw), size):
                other.sendall(raw[at : at + size])
                ends.append(stream.read())
            assert ends == [False] * (len(ends) - 1) + [True]
            assert len(stream.times) == 4 and stream.times == sorted(stream.times)


@pytest.mark.parametrize(
    "raw", [b"HTTP/1.1 400 Bad\r\n\r\n{}", HEAD + b'data: {"error": 3}\n\n', b""]
)
def test_what_is_no_stream(raw: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stream = Stream(ARGS, server.getsockname()[1], [5, 6])
        other, _ = server.accept()
        with contextlib.closing(stream.socket), other:
            other.recv(4096)
            other.sendall(raw)
            other.shutdown(socket.SHUT_WR)
            with pytest.raises(RuntimeError):
                stream.read()
