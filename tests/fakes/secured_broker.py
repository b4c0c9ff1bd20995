"""An embedded broker as a careful operator runs it: TLS everywhere, a password for every client, no right by default.

Two listeners beside the good one show what is wrong with a broker: an expired certificate, one for another host.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra import local_broker
from infra.access_rights import Permission, Role, permissions
from infra.kafka_acls import KafkaAcls
from infra.kafka_clients import KafkaSettings
from schemas.ids import RunId
from tests.fakes.certificates import Authority

MECHANISM = "SCRAM-SHA-512"
ADMIN = "admin"
NOBODY = "nobody"
"""a user without any right"""
USERS = (ADMIN, NOBODY, *Role)


def password_of(user: str) -> str:
    """Found again wherever it leaks to."""
    return f"hush-{user}-4711-not-to-be-seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuredBroker:
    """It runs."""

    port: int
    expired_port: int
    other_host_port: int
    authority: Path
    strange_authority: Path
    folder: Path

    def security(self, user: str = ADMIN, **changes: str) -> dict[str, str]:
        """The settings of a user's client."""
        return {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": MECHANISM,
            "sasl_plain_username": user,
            "sasl_plain_password": password_of(user),
            "ssl_cafile": str(self.authority),
            **changes,
        }

    def settings(self, user: str = ADMIN, **changes: str) -> KafkaSettings:
        """How that client is built."""
        return KafkaSettings(
            bootstrap_servers=f"127.0.0.1:{self.port}", security=self.security(user, **changes), init_timeout_s=5.0
        )

    def environment(self, user: str = ADMIN, *, port: int | None = None, by_file: bool = False) -> dict[str, str]:
        """The environment of a command of that user."""
        named = {f"DRIFTLOG_KAFKA_{key.upper()}": value for key, value in self.security(user).items()}
        if by_file:
            secret = self.folder / f"{user}.password"
            secret.write_text(named.pop("DRIFTLOG_KAFKA_SASL_PLAIN_PASSWORD") + "\n")
            named["DRIFTLOG_KAFKA_SASL_PLAIN_PASSWORD_FILE"] = str(secret)
        return {"DRIFTLOG_KAFKA": f"127.0.0.1:{port or self.port}", **named}

    def grant(self, run: str, principals: Mapping[Role, str] | None = None) -> tuple[Permission, ...]:
        """Give users the rights of roles; by default each role to the user of its name."""
        named = principals if principals is not None else {role: str(role) for role in Role}
        wanted = permissions({role: [f"User:{user}"] for role, user in named.items()}, RunId(run))
        acls = KafkaAcls(self.settings())
        try:
            acls.create(wanted)
        finally:
            acls.close()
        return wanted


@contextmanager
def secured_broker(folder: Path, jars: Path) -> Iterator[SecuredBroker]:
    """Start it, stop it."""
    good, strange = Authority(folder / "certificates"), Authority(folder / "strange", "strange-authority")
    port, expired_port, other_host_port, internal_port, controller_port = free_ports(5)
    secured = SecuredBroker(
        port=port,
        expired_port=expired_port,
        other_host_port=other_host_port,
        authority=good.file,
        strange_authority=strange.file,
        folder=folder,
    )
    stores = {
        "client": good.issue("broker"),
        "expired": good.issue("expired", expired=True),
        "otherhost": good.issue("otherhost", host="broker.example"),
    }
    ports = {
        "CLIENT": port,
        "EXPIRED": expired_port,
        "OTHERHOST": other_host_port,
        "INTERNAL": internal_port,
        "CONTROLLER": controller_port,
    }
    options = local_broker.BrokerOptions(
        properties=_properties(ports, stores, good.file),
        format_arguments=tuple(
            word
            for user in USERS
            for word in ("--add-scram", f"{MECHANISM}=[name={user},password={password_of(user)}]")
        ),
        security=secured.security(),
    )
    data_dir = folder / "broker"
    local_broker.start(data_dir, jars=jars, port=port, die_with_parent=True, options=options)
    try:
        yield secured
    finally:
        local_broker.stop(data_dir)


def free_ports(count: int) -> list[int]:
    """Different ones, free a moment ago."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _properties(ports: Mapping[str, int], stores: Mapping[str, Path], authority: Path) -> dict[str, str]:
    own = {"ssl.keystore.type": "PEM", "ssl.truststore.type": "PEM", "ssl.truststore.location": str(authority)}
    found = {
        "controller.quorum.voters": f"1@127.0.0.1:{ports['CONTROLLER']}",
        "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items()),
        "advertised.listeners": ",".join(
            f"{name}://127.0.0.1:{port}" for name, port in ports.items() if name != "CONTROLLER"
        ),
        "listener.security.protocol.map": ",".join(
            f"{name}:{'SSL' if name in ('INTERNAL', 'CONTROLLER') else 'SASL_SSL'}" for name in ports
        ),
        "inter.broker.listener.name": "INTERNAL",
        "ssl.keystore.location": str(stores["client"]),
        **own,
        "listener.name.internal.ssl.client.auth": "required",
        "listener.name.controller.ssl.client.auth": "required",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:CN=broker;User:{ADMIN}",
        "sasl.enabled.mechanisms": MECHANISM,
    }
    for name in ("client", "expired", "otherhost"):
        found |= {
            f"listener.name.{name}.ssl.keystore.type": "PEM",
            f"listener.name.{name}.ssl.keystore.location": str(stores[name]),
            f"listener.name.{name}.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
        }
    return found
