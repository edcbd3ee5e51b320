"""An HTTP proxy in front of an S3 server, which fails as networks and stores do."""

import contextlib
import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

# busy: the answer is 503. reset: the connection is reset before the request is passed on. lost: the request is passed
# on, and the connection is reset in place of an answer. cut: the connection is reset in the middle of the answer's
# body. stall: there is no answer. (moved, which a test may ask for: the answer is 301.)
FAULTS = ("busy", "reset", "lost", "cut", "stall")


class FaultyProxy:
    """Passes requests on to `upstream`, but for those that fault(method, path) names a fault for.

    counts: how often each fault was injected, and None: the requests that were passed on.
    """

    def __init__(self, upstream: str):
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.counts: Counter[str | None] = Counter()
        self.requests: list[str] = []
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(urlsplit(upstream).netloc))
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients leave when they time out
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def one_in(self, number: int, seed: int = 0, faults: tuple[str, ...] = FAULTS) -> None:
        """Let one in so many requests fail, by the faults in turn."""
        generator, lock = random.Random(seed), threading.Lock()

        def fault(method: str, path: str) -> str | None:
            with lock:
                return generator.choice(faults) if generator.random() < 1 / number else None

        self.fault = fault

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self, upstream: str) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.fault(self.command, self.path)
                proxy.counts[fault] += 1
                proxy.requests.append(f"{self.command} {self.path} {fault or ''}")
                if fault == "stall":
                    proxy._released.wait()
                if fault in ("stall", "reset"):
                    return self._reset()
                if fault == "moved":
                    return self._answer(301, {}, b"<Error><Code>PermanentRedirect</Code></Error>")
                if fault == "busy":
                    return self._answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                connection = http.client.HTTPConnection(upstream, timeout=60)
                try:
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(body)
                    response = connection.getresponse()
                    content = response.read()
                finally:
                    connection.close()
                if fault == "lost":
                    return self._reset()
                return self._answer(response.status, dict(response.getheaders()), content, cut=fault == "cut")

            def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                if self.command == "HEAD":
                    self.send_header("Content-Length", headers.get("Content-Length", "0"))
                    self.end_headers()
                    return
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if cut else content)
                if cut:
                    self._reset()

            def _reset(self) -> None:
                self.wfile.flush()
                time.sleep(0.05)  # what was written is to arrive before the reset
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler._pass_on)
        return Handler


@contextlib.contextmanager
def faulty(upstream: str) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()
