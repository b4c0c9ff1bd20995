"""Settings that secure a Kafka client: which there are, which of them are secrets, what makes them unusable, and what
a refusal of the broker means. Guarantees: no message of this module holds the value of a secret.
"""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

from schemas.errors import ConfigError, EnvironmentMissing

SECURITY_KEYS = (
    "security_protocol", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password", "sasl_kerberos_name",
    "sasl_kerberos_service_name", "sasl_kerberos_domain_name", "ssl_cafile", "ssl_certfile", "ssl_keyfile",
    "ssl_crlfile", "ssl_password", "ssl_ciphers", "ssl_check_hostname", "proxy_url",
)  # fmt: skip
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_WITH_PASSWORD = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_FILES = ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_crlfile")

# (mark in what the client logs, meaning and what to do). The first that fits counts: the special before the general.
_FOR_GOOD = (
    (
        "SaslAuthenticationFailed",
        "user name or password refused: check sasl_plain_username and sasl_plain_password, and the user at the broker",
    ),
    ("UnsupportedSaslMechanism", "the broker does not offer this sasl_mechanism"),
    ("certificate has expired", "the broker's certificate has expired: renew it, then start again"),
    (
        "ostname mismatch",
        "the broker's certificate is for another host: name the broker as its certificate does, or renew it",
    ),
    (
        "IP address mismatch",
        "the broker's certificate is for another host: name the broker as its certificate does, or renew it",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the broker's certificate is signed by nobody known here: set ssl_cafile to the certificate of its authority",
    ),
    ("ertificate", "TLS certificate problem: check ssl_certfile and ssl_keyfile"),
    ("CERTIFICATE", "TLS certificate problem: check ssl_certfile and ssl_keyfile"),
    ("WRONG_VERSION_NUMBER", "the broker does not speak TLS on this port: check security_protocol"),
    ("InvalidReceiveError", "the broker speaks TLS, this client does not: set kafka.security.security_protocol"),
)


def check_security(security: Mapping[str, str]) -> None:
    """ConfigError: an unknown setting (names the nearest), or settings that cannot work together."""
    for key in security:
        if key not in SECURITY_KEYS:
            near = difflib.get_close_matches(key, SECURITY_KEYS, n=2)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; known: {', '.join(SECURITY_KEYS)}"
            raise ConfigError(f"kafka.security: unknown setting {key!r}{hint}")
    protocol, mechanism = security.get("security_protocol", "PLAINTEXT"), security.get("sasl_mechanism")
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"kafka.security.security_protocol: {protocol!r} is none of {', '.join(_PROTOCOLS)}")
    if not protocol.startswith("SASL"):
        return
    if mechanism is None:
        raise ConfigError(f"kafka.security: {protocol} needs sasl_mechanism, for example SCRAM-SHA-512")
    if mechanism in _WITH_PASSWORD:
        for key in ("sasl_plain_username", "sasl_plain_password"):
            if not security.get(key):
                raise ConfigError(
                    f"kafka.security: {mechanism} needs {key}: set DRIFTLOG_KAFKA_{key.upper()}, or "
                    f"DRIFTLOG_KAFKA_{key.upper()}_FILE to a file that holds it"
                )


def check_files(security: Mapping[str, str]) -> None:
    """Read certificates and keys as the client will, which names no file. EnvironmentMissing says which is unusable."""
    for key in _FILES:
        if key in security and not Path(security[key]).is_file():
            raise EnvironmentMissing(f"kafka.security.{key}: {security[key]} is not there, or no file")
    if not security.get("security_protocol", "").endswith("SSL"):
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tried = ""
    try:
        if "ssl_cafile" in security:
            tried = f"ssl_cafile: {security['ssl_cafile']} holds no certificate in PEM form"
            context.load_verify_locations(security["ssl_cafile"])
        if "ssl_certfile" in security:
            tried = (
                f"ssl_certfile: {security['ssl_certfile']} and its key (ssl_keyfile, opened with ssl_password) do not "
                "go together, or are not in PEM form"
            )
            # Without a password OpenSSL would ask for one at the terminal.
            password = security.get("ssl_password", "")
            context.load_cert_chain(security["ssl_certfile"], security.get("ssl_keyfile"), lambda: password)
    except (ssl.SSLError, OSError) as error:
        raise EnvironmentMissing(f"kafka.security.{tried} ({type(error).__name__})") from error


def refusal(seen: Sequence[str]) -> str | None:
    """What the client's words mean, when no further try can help; None: another try may."""
    for mark, meaning in _FOR_GOOD:
        cause = next((words for words in seen if mark in words), None)
        if cause is not None:
            return f"{meaning} ({cause})"
    return None
