"""Sockets of kafka-python that nobody else closes.

A client that is closed while it connects, or with bytes still to be written, drops its sockets as they are: open until
the garbage collector comes by, which then warns of them in whatever runs at that moment. Guarantees: when a client of
ours is closed, every socket that it ever opened is closed, and one that does not get connected is closed at once; what
a broker says before it hangs up is heard.
"""

from __future__ import annotations

import socket
import weakref
from typing import Any

from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport

_sock_connect = KafkaNetSocket.sock_connect
_handshake = KafkaSSLTransport.handshake
_receive_tcp = KafkaTCPTransport._sock_recv
_receive_ssl = KafkaSSLTransport._sock_recv
_opened: weakref.WeakKeyDictionary[Any, weakref.WeakSet[socket.socket]] = weakref.WeakKeyDictionary()
"""event loop of a client -> its sockets"""


class ClosingNetClient(KafkaNetClient):  # type: ignore[misc]
    """The network client of producers, consumers and admins, which leaves nothing open."""

    def __init__(self, **configs: Any) -> None:
        KafkaNetSocket.sock_connect = connect_or_close
        KafkaSSLTransport.handshake = shake_hands_or_close
        KafkaTCPTransport._sock_recv = receive_then_end_tcp
        KafkaSSLTransport._sock_recv = receive_then_end_ssl
        super().__init__(**configs)
        self._stopped = False

    def stop_trying(self) -> None:
        """End the search for a first broker at its next turn: a refused password is refused the next time, too.

        To be called on the client's own loop only. Its search goes on until its time is up or its manager is closed.
        """
        if not self._manager.bootstrapped:
            self._stopped = self._manager.closed = True

    def close(self, node_id: Any = None) -> None:
        """Close one connection, or all and the event loop with them."""
        if self._stopped:  # so far it only looks closed
            self._stopped = self._manager.closed = False
        super().close(node_id)
        if node_id is None:
            for sock in tuple(_opened.pop(self._net, ())):
                sock.close()


async def connect_or_close(self: Any, net: Any, sock: Any, sockaddr: Any, timeout_at: float | None = None) -> Any:
    """KafkaNetSocket.sock_connect, which gives up its socket for good when it ends in any other way than connected."""
    _opened.setdefault(net, weakref.WeakSet()).add(sock)
    try:
        return await _sock_connect(self, net, sock, sockaddr, timeout_at=timeout_at)
    except BaseException:  # GeneratorExit above all: the client is closed
        sock.close()
        raise


async def shake_hands_or_close(self: Any) -> None:
    """KafkaSSLTransport.handshake, likewise; TLS wraps the connected socket in another one."""
    _opened.setdefault(self._net, weakref.WeakSet()).add(self._sock)
    try:
        await _handshake(self)
    except BaseException:
        self._sock.close()
        raise


def receive_then_end_tcp(self: Any) -> tuple[bytes, Any]:
    """KafkaTCPTransport._sock_recv: data first, the end of the connection at the next read.

    With both at once the connection counts as lost before anybody has looked at the data, and a broker that refuses a
    password says so and hangs up: the client would know of a lost connection, nothing else, and try again for ever.
    """
    return _data_first(*_receive_tcp(self))


def receive_then_end_ssl(self: Any) -> tuple[bytes, Any]:
    """KafkaSSLTransport._sock_recv, likewise. A closed connection is readable again and again."""
    return _data_first(*_receive_ssl(self))


def _data_first(data: bytes, error: Any) -> tuple[bytes, Any]:
    return (data, None) if data else (data, error)
