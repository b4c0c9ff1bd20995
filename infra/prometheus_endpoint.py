"""Answers /metrics and /healthz over HTTP, on a thread beside the service. The only module with prometheus_client.

Guarantees: a port that is taken is said in the log and tried again, and never stops a service; a scrape reads a copy
and makes no service wait; a request takes a bounded time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infra.logs import event
from infra.readings import Readings

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_LIMIT_S = 5.0
"""a client that sends nothing must not keep a thread"""
RETRY_S = 5.0
_CLOSE_LIMIT_S = 5.0


class Pulse:
    """Whether the loop of a service still turns, and whether its broker answers. State: when it did; since when not.

    The verdict is the loop's alone: a service waits for a broker that is away, and starting it again would not help."""

    def __init__(self, limit_s: float, started_s: float) -> None:
        self._limit_s = limit_s
        self._turned_s = started_s
        self._turns = False
        self._unreachable_since_us: int | None = None

    def turned(self, now_s: float) -> None:
        """It did; monotonic seconds."""
        self._turned_s, self._turns = now_s, True

    def broker(self, *, answered: bool, asked_us: int) -> None:
        """The broker was asked something then, by the wall clock."""
        if answered:
            self._unreachable_since_us = None
        elif self._unreachable_since_us is None:
            self._unreachable_since_us = asked_us

    def verdict(self, now_s: float) -> tuple[bool, str]:
        """(healthy, why)."""
        healthy, words = self._loop(now_s)
        since_us = self._unreachable_since_us
        if since_us is not None:
            words += f"; broker unreachable since {datetime.fromtimestamp(since_us // 1_000_000, UTC).isoformat()}"
        return healthy, words

    def _loop(self, now_s: float) -> tuple[bool, str]:
        age_s = max(0.0, now_s - self._turned_s)
        if not self._turns:
            return False, "the service prepares itself: its loop has not begun"
        if age_s > self._limit_s:
            return False, f"the loop turned last {age_s:.0f} s ago, at most {self._limit_s:g} s are allowed"
        return True, f"the loop turned {age_s:.1f} s ago"


class ReadingsCollector(Collector):
    """The numbers of the process, with the labels of the process."""

    def __init__(self, readings: Readings, labels: Mapping[str, str]) -> None:
        self._readings = readings
        self._labels = dict(labels)

    def collect(self) -> Iterable[Metric]:
        """One family for each series that has a number."""
        mine = tuple(self._labels)
        values = tuple(self._labels.values())
        for series, numbers in self._readings.snapshot():
            family_type = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
            # A series' own label wins over one of the process with the same name.
            kept = [place for place, name in enumerate(mine) if name not in series.labels]
            labels = [*(mine[place] for place in kept), *series.labels]
            family = family_type(series.name, series.meaning, labels=labels)
            for key, number in sorted(numbers.items()):
                family.add_metric([*(values[place] for place in kept), *key], number)
            yield family


def exposition(readings: Readings, labels: Mapping[str, str], *, process: bool = False) -> bytes:
    """The text that Prometheus reads. `process`: with memory and processor time of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReadingsCollector(readings, labels))
    if process:
        ProcessCollector(registry=registry)
    return generate_latest(registry)


class Endpoint:
    """The HTTP server of one service. `start`, then `close`."""

    def __init__(
        self,
        address: tuple[str, int],
        page: Callable[[], bytes],
        health: Callable[[], tuple[bool, str]],
    ) -> None:
        """`address`: host and port; port 0 takes a free one."""
        self._address = address
        self._page = page
        self._health = health
        self._server: ThreadingHTTPServer | None = None
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Begin to listen; returns at once."""
        self._thread.start()

    def wait_until_open(self, limit_s: float) -> int | None:
        """The port it listens on; None when it does not within the limit."""
        if not self._ready.wait(limit_s) or self._server is None:
            return None
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening, in bounded time. Safe to call twice, and before start."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        handler = _handler(self._page, self._health)
        said = False
        while not self._closing.is_set():
            try:
                server = _Server(self._address, handler)
            except OSError as error:
                if not said:
                    where = "{}:{}".format(*self._address)
                    event(log, "metrics_port_unusable", level=logging.WARNING, address=where, reason=str(error))
                said = True
                self._closing.wait(RETRY_S)
                continue
            with server:
                self._server = server
                self._ready.set()
                event(log, "metrics_open", host=self._address[0], port=server.server_address[1])
                while not self._closing.is_set():
                    server.handle_request()
            return


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    timeout = 0.2
    """of one wait for a request: how late a close is noticed"""

    def server_bind(self) -> None:
        """Without the question for the name of the host, which may take seconds and is never used."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up in the middle is not worth a traceback."""
        event(log, "metrics_request_failed", level=logging.DEBUG, exc_info=True, client=str(client_address))


def _handler(page: Callable[[], bytes], health: Callable[[], tuple[bool, str]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_LIMIT_S
        server_version = "driftlog"
        sys_version = ""

        def do_GET(self) -> None:
            """The two pages."""
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE, page())
            elif path == "/healthz":
                healthy, words = health()
                self._answer(200 if healthy else 503, "text/plain; charset=utf-8", f"{words}\n".encode())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"there are /metrics and /healthz\n")

        do_HEAD = do_GET

        def _answer(self, code: int, content_type: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape every few seconds is not news."""

    return Handler
