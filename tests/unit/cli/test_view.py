"""The live view: a fold over the log, drawn as a panel or as plain lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from driftlog.view import View, panel, plain_line, sparkline
from driftlog.view_state import RunState
from infra.ports import Headers, Record
from schemas.evaluation_codec import EvaluationRow, encode_evaluation, evaluation_headers
from schemas.headers import control_headers, json_headers
from schemas.heartbeat import Heartbeat
from schemas.ids import RunId
from schemas.ledger import (
    Decision,
    DecisionRow,
    LedgerEnded,
    OpenGroup,
    Position,
    Settled,
    StepCompleted,
    Subject,
    encode_ledger_control,
)
from schemas.ledger_codec import decisions_headers, encode_decisions
from schemas.policy_events import AnyPolicyEvent, RunStarted, VersionPublished, WorkerJoined, encode_policy_event

RUN = RunId("demo")
OPEN = OpenGroup(group_id="demo/p000001/e0/a0", request_position=0, issued_at_us=0, attempt=0, intended_step=0)


class Log:
    """Makes records with rising offsets and feeds them to a RunState."""

    def __init__(self) -> None:
        self.state = RunState(RUN)
        self._offset = 0

    def put(self, name: str, value: bytes, headers: Headers) -> None:
        record = Record(
            topic=f"demo.{name}",
            partition=0,
            offset=self._offset,
            key=None,
            value=value,
            headers=headers,
            timestamp_ms=0,
        )
        self._offset += 1
        self.state.apply(record)

    def policy(self, event: AnyPolicyEvent) -> None:
        value = encode_policy_event(event)
        self.put("policy", value, control_headers(event, value, "test"))

    def ledger(self, control: StepCompleted | Settled | LedgerEnded, decisions: tuple[DecisionRow, ...] = ()) -> None:
        if decisions:
            value = encode_decisions(decisions)
            self.put("ledger", value, decisions_headers(decisions, value, "test"))
        value = encode_ledger_control(control)
        self.put("ledger", value, control_headers(control, value, "test"))

    def heartbeat(self, worker: str, incarnation: str, tokens_per_s: float) -> None:
        beat = Heartbeat(
            run="demo", at_us=1, worker=worker, incarnation=incarnation, sequence=0, state="serving", version=1,
            claims=("demo/p000001/e0/a0",), tokens_total=10, groups_total=1, tokens_per_s=tokens_per_s,
            idle_fraction=0.25,
        )  # fmt: skip
        value = beat.model_dump_json().encode()
        self.put("workers", value, json_headers(event_type="Heartbeat", source="test", value=value, at_us=1))


def _position(open_groups: tuple[OpenGroup, ...] = ()) -> Position:
    return Position(open_groups=open_groups, next_request=1, prompt_cursor=1, partitions={})


def _step(version: int, at_us: int, **metrics: float) -> StepCompleted:
    return StepCompleted(
        run="demo", at_us=at_us, position=_position((OPEN,)), policy_read_up_to=0, version_in=version - 1,
        version_out=version, groups=1, trajectories=4, batch_digest="", metrics=metrics, phase_s={}, rng_digest="",
        config_digest="", code_revision="",
    )  # fmt: skip


def _dropped(reason: str) -> DecisionRow:
    return DecisionRow(
        subject=Subject.TRAJECTORY, group_id="demo/p000001/e0/a0", trajectory_id="demo/p000001/e0/a0/0", partition=0,
        offset=0, row=0, row_sha256="00", decision=Decision.DROPPED, reason=reason, policy_lag=None, weight=0.0,
        use_count=0, reward=None, advantage=None, completion_tokens=1, consumed_at_us=0,
    )  # fmt: skip


@pytest.fixture
def log() -> Log:
    log = Log()
    log.policy(RunStarted(run="demo", at_us=0, segment=0, config_digest="", code_revision=""))
    log.policy(WorkerJoined(run="demo", at_us=0, worker="g0", incarnation="i1", engine="hf", dtype="float32"))
    published = VersionPublished(
        run="demo", at_us=0, version=0, parent=None, depth=0, manifest_uri="demo/a/manifest.json",
        manifest_sha256="ab", bytes=1, optimizer_step=0, oldest_open_request=0,
    )  # fmt: skip
    log.policy(published)
    return log


def test_steps_add_up_to_success_lag_drops_and_speed(log: Log) -> None:
    log.ledger(_step(1, 1_000_000, **{"critic/rewards/mean": 0.25, "policy_lag/count_0": 4.0, "dropped/stale": 2.0}))
    log.ledger(_step(2, 1_500_000, **{"critic/rewards/mean": 0.75, "policy_lag/count_1": 4.0}))

    state = log.state
    assert state.success(10) == 0.5
    assert dict(state.lags) == {0: 4, 1: 4}
    assert dict(state.drops) == {"stale": 2}
    assert state.versions_per_s() == 2.0
    assert (state.steps_total, state.trained, state.open_groups) == (2, 8, 1)


def test_drops_of_a_settle_transaction_are_counted_from_its_rows(log: Log) -> None:
    settled = Settled(run="demo", at_us=1, position=_position(), policy_read_up_to=0, reason="decisions")

    log.ledger(settled, (_dropped("duplicate"),))

    assert dict(log.state.drops) == {"duplicate": 1}
    assert log.state.open_groups == 0


def test_only_current_incarnations_count_for_the_speed(log: Log) -> None:
    log.heartbeat("g0", "i0", 1000.0)
    log.heartbeat("g0", "i1", 50.0)

    assert log.state.tokens_per_s() == 50.0
    assert [(name, standing) for name, standing, _ in log.state.workers()] == [("g0", "joined")]


def test_a_record_that_cannot_be_read_is_counted_and_left_out(log: Log) -> None:
    log.put("policy", b"no JSON", ())

    assert log.state.undecodable == 1
    assert log.state.newest == 0


def test_the_end_of_the_ledger_is_seen(log: Log) -> None:
    ended = LedgerEnded(
        run="demo", at_us=1, position=_position(), policy_read_up_to=0, last_version=0, reason="completed"
    )

    log.ledger(ended)

    assert log.state.ledger_ended


def test_a_sparkline_averages_more_values_than_fit() -> None:
    assert sparkline([0.0, 0.5, 1.0], 3, unicode=False) == "_+@"
    assert sparkline([0.0] * 50 + [1.0] * 50, 2, unicode=False) == "_@"
    assert sparkline([], 5) == ""


def test_the_plain_line_tells_what_the_panel_shows(log: Log) -> None:
    log.ledger(_step(1, 1_000_000, **{"critic/rewards/mean": 0.25, "policy_lag/count_1": 4.0, "actor/ratio_ess": 0.9}))

    line = plain_line(log.state, 10)

    for words in ("version 0/10 (live -)", "success 0.25", "lag 1:100%", "1 groups open", "ESS 0.90", "workers 0/1"):
        assert words in line


def test_the_panel_is_drawn_on_a_terminal_without_unicode(log: Log) -> None:
    log.ledger(
        _step(1, 1_000_000, **{"critic/rewards/mean": 0.5, "policy_lag/count_0": 3.0, "policy_lag/count_1": 1.0})
    )
    log.heartbeat("g0", "i1", 50.0)
    console = Console(file=io.StringIO(), width=120, force_terminal=True, legacy_windows=False)

    with console.capture() as shown:
        console.print(panel(log.state, "demo", 10, {"trainer": "up"}, unicode=False))

    for words in ("driftlog demo", "0 of 10 published", "75%", "g0 joined, serving v1", "trainer up"):
        assert words in shown.get()


def test_without_a_terminal_lines_come_every_few_seconds_and_only_when_something_changed(log: Log) -> None:
    stream = io.StringIO()
    with View("demo", 10, refresh_s=1.0, console=Console(file=stream, width=200)) as view:
        view.update(log.state, 0.0, {})
        view.update(log.state, 1.0, {})
        view.update(log.state, 6.0, {})
        log.ledger(_step(1, 1_000_000))
        view.update(log.state, 12.0, {})

    assert len(stream.getvalue().splitlines()) == 2


def test_the_last_evaluation_is_shown_where_there_is_one(log: Log) -> None:
    assert "evaluation" not in plain_line(log.state, 10)
    rows = (
        EvaluationRow(
            version=3, task="t", prompt_id="p", sample=0, temperature=0.0, reward=0.5, reward_error=None,
            completion_tokens=3, finish_reason="stop", evaluated_at_us=0,
        ),
    )  # fmt: skip
    value = encode_evaluation(rows)
    log.put("evaluations", value, evaluation_headers(rows, value, "evaluator"))
    log.put("evaluations", b"noise", ())

    assert "evaluation of version 3: greedy 0.50 (1 prompts)" in plain_line(log.state, 10)
    console = Console(file=io.StringIO(), width=120)
    console.print(panel(log.state, "demo", 10, {}))
    assert "version 3: greedy 0.50 (1 prompts)" in console.file.getvalue()  # type: ignore[attr-defined]
    assert log.state.undecodable == 1
