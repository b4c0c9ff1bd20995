"""Sockets of kafka-python that nobody else closes.

A client that is closed while it connects, or with bytes still to be written, drops its sockets as they are: open until
the garbage collector comes by, which then warns of them in whatever runs at that moment. Guarantee: when a client of
ours is closed, every socket that it ever opened is closed, and one that does not get connected is closed at once.
"""

from __future__ import annotations

import socket
import weakref
from typing import Any

from kafka.net.compat import KafkaNetClient
from kafka.net.inet import KafkaNetSocket
from kafka.net.transport import KafkaSSLTransport

_sock_connect = KafkaNetSocket.sock_connect
_handshake = KafkaSSLTransport.handshake
_opened: weakref.WeakKeyDictionary[Any, weakref.WeakSet[socket.socket]] = weakref.WeakKeyDictionary()
"""event loop of a client -> its sockets"""


class ClosingNetClient(KafkaNetClient):  # type: ignore[misc]
    """The network client of producers, consumers and admins, which leaves nothing open."""

    def __init__(self, **configs: Any) -> None:
        KafkaNetSocket.sock_connect = connect_or_close
        KafkaSSLTransport.handshake = shake_hands_or_close
        super().__init__(**configs)

    def close(self, node_id: Any = None) -> None:
        """Close one connection, or all and the event loop with them."""
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
