"""One trace from the request over its rows to the step: in headers, in log lines, in spans."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from consumers.offline.trace import trace
from driftlog.spans import Spans
from driftlog.taps import tapped, tapped_transactions
from infra.ports import Message, Record
from infra.tracing import Tracing, otlp_exporter
from schemas.errors import ConfigError
from schemas.headers import TRACEPARENT, header_text
from schemas.prompt_codec import decode_request
from schemas.topics import TopicName
from schemas.trace_context import parse_traceparent, request_context, trace_id_of
from tests.fakes.simulated_run import SimulatedRun
from tests.sim.services import RUN

VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[SimulatedRun, list[tuple[str, str, str | None]]]:
    """A run, and the lines of its groups: (event, group, trace)."""
    lines: list[tuple[str, str, str | None]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = getattr(record, "driftlog_fields", {})
            if "trace" in fields:
                lines.append((str(record.msg), fields["group"], fields["trace"]))

    loggers = [logging.getLogger(name) for name in ("producers.generator", "consumers.trainer.publisher")]
    handler = Keep()
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        run = SimulatedRun(tmp_path_factory.mktemp("told"), versions=2)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
    return run, lines


def traces_of_requests(run: SimulatedRun) -> dict[str, str | None]:
    requests = [decode_request(record.value, record.headers) for record in run.records(TopicName.PROMPTS)]
    return {request.group_id: trace_id_of(request.traceparent) for request in requests}


def test_every_request_has_a_trace_of_its_own_and_its_rows_carry_it(told: tuple[SimulatedRun, object]) -> None:
    traces = traces_of_requests(told[0])

    assert len(set(traces.values()) - {None}) == len(traces)
    rows = told[0].records(TopicName.TRAJECTORIES)
    assert rows
    assert all(trace_id_of(header_text(r.headers, TRACEPARENT)) == traces[(r.key or b"").decode()] for r in rows)


def test_the_lines_of_generator_and_step_name_the_trace_of_the_request(
    told: tuple[SimulatedRun, list[tuple[str, str, str | None]]],
) -> None:
    run, lines = told
    traces = traces_of_requests(run)

    assert {name for name, _, _ in lines} == {"group_started", "group_sampled", "group_trained"}
    assert all(trace_id == traces[group] for _, group, trace_id in lines)


def test_the_trace_command_says_it(told: tuple[SimulatedRun, object]) -> None:
    group_id, trace_id = next(iter(traces_of_requests(told[0]).items()))

    found = trace(told[0].run_log(), group_id)

    assert found.facts["request"]["trace"] == trace_id
    assert f"trace {trace_id}" in found.text()


def test_the_trace_of_a_request_is_the_same_for_everybody_and_another_for_a_later_run_of_the_same_name() -> None:
    assert request_context("demo/p1/e0/a0", 5) == request_context("demo/p1/e0/a0", 5)
    assert request_context("demo/p1/e0/a0", 5).trace_id != request_context("demo/p1/e0/a0", 6).trace_id
    assert parse_traceparent(str(request_context("demo/p1/e0/a0", 5))) == request_context("demo/p1/e0/a0", 5)


@pytest.mark.parametrize(
    "header",
    [
        None, "", "00-ab-cd-01", VALID.upper(), f"{VALID}-more", VALID.replace("00-", "ff-", 1), f"{VALID}\n",
        f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
    ],
)  # fmt: skip
def test_a_header_that_is_no_traceparent_counts_as_none(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_a_later_version_of_the_standard_is_read_as_far_as_it_is_known() -> None:
    assert trace_id_of(f"01{VALID[2:]}-more") == "0af7651916cd43dd8448eb211c80319c"


# ---------------------------------------------------------------------- spans


def spans_of(records: Sequence[Record]) -> tuple[ReadableSpan, ...]:
    exporter = InMemorySpanExporter()
    tracing = Tracing("trainer", str(RUN), exporter, at_once=True)
    spans = Spans(RUN, tracing.emit)
    for record in records:
        spans.written([Message(topic=record.topic, key=record.key or b"", value=record.value, headers=record.headers)])
    tracing.close()
    return exporter.get_finished_spans()


def ledger_steps(run: SimulatedRun) -> Sequence[ReadableSpan]:
    """As the trainer writes: decisions and control in one transaction."""
    exporter = InMemorySpanExporter()
    tracing = Tracing("trainer", str(RUN), exporter, at_once=True)
    spans = Spans(RUN, tracing.emit)
    held: list[Message] = []
    for record in run.records(TopicName.LEDGER):
        held.append(Message(topic=record.topic, key=record.key or b"", value=record.value, headers=record.headers))
        if held[-1].value is not None and held[-1].value.startswith(b"{"):
            spans.written(held)
            held = []
    return exporter.get_finished_spans()


def test_a_group_hangs_below_its_request_and_a_step_links_to_its_groups(told: tuple[SimulatedRun, object]) -> None:
    run = told[0]
    traces = set(traces_of_requests(run).values())
    requests = spans_of(run.records(TopicName.PROMPTS))
    groups = spans_of(run.records(TopicName.TRAJECTORIES))
    steps = ledger_steps(run)

    own = {span.context.span_id: span for span in requests if span.context is not None}
    assert {f"{span.context.trace_id:032x}" for span in requests if span.context} == traces
    assert {span.name for span in groups} == {"generate"}
    for span in groups:
        assert span.parent is not None
        assert span.context is not None
        assert own[span.parent.span_id].context.trace_id == span.context.trace_id  # type: ignore[union-attr]
        assert (span.end_time or 0) >= (span.start_time or 0) > 0
    assert [span.name for span in steps] == ["step", "step"]
    assert all(f"{link.context.trace_id:032x}" in traces for span in steps for link in span.links)
    assert [len(span.links) for span in steps] == [2, 2]


def test_a_record_that_cannot_be_traced_is_said_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    broken = Message(topic=f"{RUN}.{TopicName.PROMPTS}", key=b"k", value=b"?", headers=())

    Spans(RUN, lambda span: None).written([broken])

    assert "record_not_traced" in [record.message for record in caplog.records]


def test_a_collector_without_the_extra_packages_is_a_mistake_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"driftlog\[otel\]"):
        otlp_exporter("http://localhost:4318/v1/traces")


def test_without_a_tap_the_writer_itself_is_used() -> None:
    writer = object()

    assert tapped(writer, ()) is writer  # type: ignore[arg-type,comparison-overlap]
    assert tapped_transactions(writer, ()) is writer  # type: ignore[arg-type,comparison-overlap]


def test_nothing_of_it_is_made_when_metrics_and_traces_are_off(tmp_path: Path) -> None:
    from driftlog.observing import observe
    from infra.config import load_config

    assert observe(load_config(None), "trainer", None) is None
