"""A socket that does not get connected is closed by us, not by the garbage collector in somebody else's test."""

from __future__ import annotations

import errno
import socket
import types
from collections.abc import Generator
from typing import Any

import pytest
from kafka.errors import KafkaConnectionError
from kafka.net.inet import KafkaNetSocket
from kafka.net.transport import KafkaSSLTransport

from infra.kafka_sockets import ClosingNetClient, _opened, connect_or_close, shake_hands_or_close


class HangingNet:
    """A network on which nothing ever becomes ready."""

    def __init__(self) -> None:
        self.waited_for: list[socket.socket] = []

    @types.coroutine
    def wait_write(self, sock: socket.socket, timeout_at: float | None = None) -> Generator[None, None, None]:
        """Suspends for good."""
        self.waited_for.append(sock)
        yield


class PendingSocket(KafkaNetSocket):  # type: ignore[misc]
    """Connects for ever, or is refused."""

    SCHEMES = ("test-pending",)

    sock_connect = connect_or_close

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.made: list[socket.socket] = []

    def __new__(cls, answer: int) -> PendingSocket:
        return object.__new__(cls)

    def socket(self, *args: Any) -> socket.socket:
        """Remembers what it hands out."""
        self.made.append(socket.socket())
        return self.made[-1]

    def connect_ex(self, sock: socket.socket, addr: Any) -> int:
        """The answer it was made with."""
        return self.answer


ADDRESS = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 9))


def test_a_client_closed_while_it_connects_closes_the_socket() -> None:
    pending, net = PendingSocket(errno.EINPROGRESS), HangingNet()
    connecting = pending.connect(net, ADDRESS)
    connecting.send(None)
    assert pending.made == net.waited_for
    assert pending.made[0].fileno() >= 0

    connecting.close()

    assert pending.made[0].fileno() == -1


def test_a_refused_connection_closes_the_socket() -> None:
    pending = PendingSocket(errno.ECONNREFUSED)

    with pytest.raises(KafkaConnectionError, match="ECONNREFUSED"):
        pending.connect(HangingNet(), ADDRESS).send(None)

    assert pending.made[0].fileno() == -1


def test_a_failed_handshake_closes_the_socket() -> None:
    class Bad:
        closed = False

        def do_handshake(self) -> None:
            raise OSError("reset")

        def close(self) -> None:
            self.closed = True

    transport, bad = KafkaSSLTransport.__new__(KafkaSSLTransport), Bad()
    transport._sock, transport._net = bad, HangingNet()

    with pytest.raises(OSError, match="reset"):
        shake_hands_or_close(transport).send(None)

    assert bad.closed


def test_a_closed_client_leaves_no_socket_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ClosingNetClient(bootstrap_servers=["127.0.0.1:9"])
        connecting = KafkaNetSocket().connect(client._net, (*ADDRESS[:4], silent.getsockname()))
        connecting.send(None)
        (opened,) = tuple(_opened[client._net])
        assert opened.fileno() >= 0

        client.close()

        assert opened.fileno() == -1
        assert client._net not in _opened
