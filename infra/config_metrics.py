"""[metrics]: what a service tells of itself while it runs. None of it decides what is learnt."""

from __future__ import annotations

from pydantic import Field

from infra.config_section import Section


class MetricsSection(Section):
    """[metrics]"""

    port: int = Field(default=0, ge=0, le=65_500)
    """on which a service answers /metrics and /healthz; 0: on none. `driftlog up` numbers its services from here.
    DRIFTLOG_METRICS_PORT and --metrics-port come before it"""
    host: str = "127.0.0.1"
    """address to listen on; whoever reaches it reads without a password. DRIFTLOG_METRICS_HOST comes before it"""
    healthy_s: float = Field(default=600.0, gt=0)
    """/healthz says 503 when the loop has not turned for this long; a training step is one turn"""
    otlp: str = ""
    """address of an OTLP/HTTP collector that gets the spans of requests and steps; empty: none; needs the extra `otel`,
    as in http://localhost:4318/v1/traces"""
