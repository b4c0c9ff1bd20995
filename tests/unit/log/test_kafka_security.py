"""Security settings are refused by name before anything connects, and no message holds a secret."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.config import load_config, parse_config
from infra.kafka_security import check_files, check_security, refusal
from infra.kafka_sockets import receive_then_end_tcp
from infra.mlflow_access import without_password
from schemas.errors import ConfigError, EnvironmentMissing
from tests.fakes.certificates import Authority

SECRET = "hush-4711"
SCRAM = {
    "security_protocol": "SASL_SSL",
    "sasl_mechanism": "SCRAM-SHA-512",
    "sasl_plain_username": "trainer",
    "sasl_plain_password": SECRET,
}


def test_what_goes_together_is_taken() -> None:
    check_security({})
    check_security(SCRAM)
    check_security({"security_protocol": "SSL"})
    check_security({"security_protocol": "SASL_SSL", "sasl_mechanism": "GSSAPI"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"security_protocol": "TLS"}, "security_protocol: 'TLS' is none of PLAINTEXT, SSL"),
        ({"sasl_mechanism": None}, "SASL_SSL needs sasl_mechanism"),
        ({"sasl_plain_username": None}, "needs sasl_plain_username: set DRIFTLOG_KAFKA_SASL_PLAIN_USERNAME"),
        ({"sasl_plain_password": ""}, "needs sasl_plain_password: .*DRIFTLOG_KAFKA_SASL_PLAIN_PASSWORD_FILE"),
        ({"sasl_password": SECRET}, "unknown setting 'sasl_password'; did you mean .*'sasl_plain_password'"),
    ],
)
def test_what_cannot_work_is_named(change: dict[str, str | None], words: str) -> None:
    changed = {key: value for key, value in {**SCRAM, **change}.items() if value is not None}

    with pytest.raises(ConfigError, match=words) as caught:
        check_security(changed)

    assert SECRET not in str(caught.value)


def test_certificates_that_the_client_could_not_use_are_named_by_file(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, others = authority.issue("own"), Authority(tmp_path / "other").issue("others")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    tls = {"security_protocol": "SSL", "ssl_cafile": str(authority.file)}

    check_files({**tls, "ssl_certfile": str(own)})
    with pytest.raises(EnvironmentMissing, match="ssl_cafile: .*nowhere.pem is not there"):
        check_files({**tls, "ssl_cafile": str(tmp_path / "nowhere.pem")})
    with pytest.raises(EnvironmentMissing, match="ssl_cafile: .*text.pem holds no certificate"):
        check_files({**tls, "ssl_cafile": str(text)})
    with pytest.raises(EnvironmentMissing, match="ssl_certfile: .*own.pem and its key"):
        check_files({**tls, "ssl_certfile": str(own), "ssl_keyfile": str(others)})


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("SaslAuthenticationFailedError: [Error 58]", "user name or password refused"),
        ("UnsupportedSaslMechanismError: [Error 33]", "does not offer this sasl_mechanism"),
        ("CERTIFICATE_VERIFY_FAILED certificate verify failed: certificate has expired", "has expired: renew it"),
        ("CERTIFICATE_VERIFY_FAILED: Hostname mismatch, certificate is not valid for 'a'", "is for another host"),
        ("CERTIFICATE_VERIFY_FAILED: IP address mismatch, certificate is not valid", "is for another host"),
        ("CERTIFICATE_VERIFY_FAILED: self-signed certificate in certificate chain", "set ssl_cafile"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "check ssl_certfile"),
        ("WRONG_VERSION_NUMBER", "does not speak TLS on this port"),
        ("InvalidReceiveError: Invalid frame length: 352518912", "the broker speaks TLS, this client does not"),
    ],
)
def test_each_refusal_of_a_broker_has_its_meaning(words: str, meaning: str) -> None:
    said = refusal(["KafkaConnectionError: socket disconnected", words])

    assert said is not None
    assert meaning in said
    assert words in said


def test_what_a_broker_says_before_it_hangs_up_is_read_before_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(b"no")
        ours.setblocking(False)
        transport = SimpleNamespace(_sock=ours)

        assert receive_then_end_tcp(transport) == (b"no", None)
        data, error = receive_then_end_tcp(transport)
        assert data == b""
        assert "socket disconnected" in str(error)


def test_a_lost_connection_is_no_refusal() -> None:
    assert refusal(["KafkaConnectionError: socket disconnected"]) is None


@pytest.mark.parametrize(
    ("section", "values", "variable"),
    [
        ("kafka", {"security": {"sasl_plain_password": SECRET}}, "DRIFTLOG_KAFKA_SASL_PLAIN_PASSWORD_FILE"),
        ("kafka", {"security": {"ssl_password": SECRET}}, "DRIFTLOG_KAFKA_SSL_PASSWORD"),
        ("kafka", {"security": {"proxy_url": f"socks5://me:{SECRET}@proxy:1080"}}, "DRIFTLOG_KAFKA_PROXY_URL"),
        ("mlflow", {"uri": f"https://me:{SECRET}@mlflow.example"}, "MLFLOW_TRACKING_URI"),
    ],
)
def test_a_configuration_holds_no_secret_for_it_is_stored(
    section: str, values: dict[str, object], variable: str
) -> None:
    with pytest.raises(ConfigError, match=variable) as caught:
        parse_config({section: values}, "run.toml")

    assert SECRET not in str(caught.value)
    assert "run.toml" in str(caught.value)


def test_a_secret_on_the_command_line_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="DRIFTLOG_KAFKA_SASL_PLAIN_PASSWORD") as caught:
        load_config(None, [f"kafka.security.sasl_plain_password={SECRET}"])

    assert SECRET not in str(caught.value)


def test_addresses_without_a_password_are_printed_as_they_are() -> None:
    for uri in ("sqlite:////data/mlflow.db", "http://mlflow:5000", "databricks"):
        assert without_password(uri) == uri
    assert SECRET not in without_password(f"postgresql://me:{SECRET}@db/mlflow")
