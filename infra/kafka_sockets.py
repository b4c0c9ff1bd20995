"""Sockets of kafka-python that nobody else closes.

A client that is closed while it connects, or whose connection fails, drops its socket as it is: open until the garbage
collector comes by, which then warns of it in whatever runs at that moment. Here the one who opened it closes it.
"""

from __future__ import annotations

from typing import Any

from kafka.net.inet import KafkaNetSocket
from kafka.net.transport import KafkaSSLTransport

_sock_connect = KafkaNetSocket.sock_connect
_handshake = KafkaSSLTransport.handshake


async def connect_or_close(self: Any, net: Any, sock: Any, sockaddr: Any, timeout_at: float | None = None) -> Any:
    """KafkaNetSocket.sock_connect, which gives up its socket for good when it ends in any other way than connected."""
    try:
        return await _sock_connect(self, net, sock, sockaddr, timeout_at=timeout_at)
    except BaseException:  # GeneratorExit above all: the client is closed
        sock.close()
        raise


async def shake_hands_or_close(self: Any) -> None:
    """KafkaSSLTransport.handshake, likewise."""
    try:
        await _handshake(self)
    except BaseException:
        self._sock.close()
        raise


def close_what_does_not_connect() -> None:
    """Put both in the place of the originals, for every client of this process. Idempotent."""
    KafkaNetSocket.sock_connect = connect_or_close
    KafkaSSLTransport.handshake = shake_hands_or_close
