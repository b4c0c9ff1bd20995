"""What is read from the environment: the registry, credentials by value and by file, the page that lists it."""

from __future__ import annotations

from pathlib import Path

import pytest

from driftlog.broker_access import kafka_settings
from driftlog.environment_variables import MAX_SECRET_BYTES, VARIABLES, is_known, kafka_security, kafka_variables
from infra.config import load_config
from infra.kafka_clients import SECURITY_KEYS
from schemas.errors import ConfigError, EnvironmentMissing

ROOT = Path(__file__).resolve().parents[3]
PASSWORD = "DRIFTLOG_KAFKA_SASL_PLAIN_PASSWORD"


def test_a_secret_is_read_from_the_file_that_its_variable_names(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("p w\n")

    found = kafka_security({}, {f"{PASSWORD}_FILE": str(tmp_path / "password")}, SECURITY_KEYS)

    assert found == {"sasl_plain_password": "p w"}


def test_the_environment_stands_in_front_of_the_configuration() -> None:
    configured = {"sasl_mechanism": "PLAIN", "ssl_cafile": "a.pem"}

    found = kafka_security(configured, {"DRIFTLOG_KAFKA_SSL_CAFILE": "b.pem"}, SECURITY_KEYS)

    assert found == {"sasl_mechanism": "PLAIN", "ssl_cafile": "b.pem"}
    assert configured["ssl_cafile"] == "a.pem"


def test_every_client_is_given_them_and_none_prints_them() -> None:
    settings = kafka_settings(load_config(None), "h:1", {PASSWORD: "hunter2", "DRIFTLOG_KAFKA": "h:1"})

    assert settings.security == {"sasl_plain_password": "hunter2"}
    assert "hunter2" not in repr(settings)


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    assert kafka_security({}, {PASSWORD: "", f"{PASSWORD}_FILE": ""}, SECURITY_KEYS) == {}


def test_a_misspelt_variable_is_refused_by_the_names_of_the_nearest() -> None:
    with pytest.raises(ConfigError, match="DRIFTLOG_KAFKA_SASL_PASSWORD: no setting .*KAFKA_SASL_PLAIN_PASSWORD"):
        kafka_security({}, {"DRIFTLOG_KAFKA_SASL_PASSWORD": "x"}, SECURITY_KEYS)


def test_a_setting_given_both_ways_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("x")

    with pytest.raises(ConfigError, match="give the same setting"):
        kafka_security({}, {PASSWORD: "x", f"{PASSWORD}_FILE": str(tmp_path / "p")}, SECURITY_KEYS)


def test_a_secret_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match=f"{PASSWORD}_FILE: .*nowhere cannot be read: No such file"):
        kafka_security({}, {f"{PASSWORD}_FILE": str(tmp_path / "nowhere")}, SECURITY_KEYS)


@pytest.mark.parametrize(
    ("content", "words"), [(b"\n", "is empty"), (b"x" * (MAX_SECRET_BYTES + 1), "is larger"), (b"\xff\xfe", "not text")]
)
def test_a_secret_file_that_holds_no_secret_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "p").write_bytes(content)

    with pytest.raises((ConfigError, EnvironmentMissing), match=words):
        kafka_security({}, {f"{PASSWORD}_FILE": str(tmp_path / "p")}, SECURITY_KEYS)


def test_known_is_what_is_read_and_nothing_else() -> None:
    assert all(is_known(name, SECURITY_KEYS) for name in ("DRIFTLOG_KAFKA", "MLFLOW_TRACKING_URI", PASSWORD))
    assert is_known(f"{PASSWORD}_FILE", SECURITY_KEYS)
    assert not is_known("DRIFTLOG_KAFKA_FILE", SECURITY_KEYS)
    assert not is_known("DRIFTLOG_RUN", SECURITY_KEYS)


def test_the_page_on_compose_has_every_variable() -> None:
    page = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    names = [*(variable.name for variable in VARIABLES), *kafka_variables(SECURITY_KEYS)]

    assert [name for name in names if f"`{name}`" not in page] == []
