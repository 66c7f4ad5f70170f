"""A real server on a free loopback port, and a client that writes raw bytes."""

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from serving.errors import RequestError
from serving.protocol.http import Headers, Request, Response, error_body
from serving.protocol.http_app import HttpApp
from serving.protocol.server import EmbeddedServer


class LoopThread:
    """An event loop in a thread of its own, of the kind that Ray gives to replicas."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        #: What went wrong there without anybody being told.
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run to completion there, wait here."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def close(self) -> None:
        """Stop and join."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def refuse(error: RequestError, headers: Headers | None) -> Response:
    """As the gateway does it, the id echoed."""
    request_id = (headers.get("x-request-id") if headers else None) or "made"
    reply_headers = [("content-type", "application/json"), ("x-request-id", request_id), *error.headers]
    return Response(error.status, reply_headers, error_body(error, request_id))


class Wire:
    """A client that writes raw bytes."""

    def connect(self, port: int, timeout_s: float = 10.0) -> socket.socket:
        """A connection with a timeout."""
        return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)

    def exchange(self, port: int, data: bytes) -> bytes:
        """Send, then read until the server closes, which it may do before it has read all."""
        with self.connect(port) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(data)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(65536):
                    received += piece
            return received

    def get(self, port: int, path: str = "/") -> bytes:
        """One GET on its own connection."""
        return self.exchange(port, f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())


@pytest.fixture
def wire() -> Wire:
    """The client."""
    return Wire()


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    """A loop for servers."""
    thread = LoopThread()
    yield thread
    thread.close()
    gc.collect()  # A task that failed unheard says so when it is collected.
    assert thread.errors == []


@pytest.fixture
def make_server(loop_thread: LoopThread) -> Iterator[Callable[..., EmbeddedServer]]:
    """Makes servers, not started; stops them after the test."""
    servers: list[EmbeddedServer] = []

    def make_server(
        handle: Callable[[Request], Any],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        app: dict[str, Any] | None = None,
        **options: Any,
    ) -> EmbeddedServer:
        made = HttpApp(handle, **{"refuse": refuse, "max_body_bytes": 100_000, **(app or {})})
        servers.append(EmbeddedServer(made, host, port, **options))
        return servers[-1]

    yield make_server
    for server in servers:
        loop_thread.run(server.stop(5))


@pytest.fixture
def start(loop_thread: LoopThread, make_server: Callable[..., EmbeddedServer]) -> Callable[..., int]:
    """Starts a server around a handler, with options for its `HttpApp`; gives its port."""

    def start(handle: Callable[[Request], Any], **app: Any) -> int:
        server = make_server(handle, app=app)
        loop_thread.run(server.start())
        return server.port

    return start
