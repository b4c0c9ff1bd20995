"""An authority of our own and the certificates it signs, as PEM files: good ones, expired ones, for another host."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = timedelta(days=1)


class Authority:
    """Signs. Valid from yesterday until tomorrow."""

    def __init__(self, folder: Path, name: str = "driftlog-test-authority") -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._now = datetime.now(UTC)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = self._builder(self._name, self._key, expired=False)
        signed = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(
            self._key, hashes.SHA256()
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, host: str = "127.0.0.1", expired: bool = False) -> Path:
        """A file with key and certificate for server and client of that address."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_name(name), key, expired=expired)
        try:
            alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            alternative = x509.DNSName(host)
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = (
            builder.add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        path = self._folder / f"{name}.pem"
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
        path.chmod(0o600)
        return path

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, expired: bool
    ) -> x509.CertificateBuilder:
        first, last = (-30 * _DAY, -2 * _DAY) if expired else (-_DAY, _DAY)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now + first)
            .not_valid_after(self._now + last)
        )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
