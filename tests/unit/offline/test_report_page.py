"""The file a report is: complete, alone, safe to open, and small whatever the length of the run."""

from __future__ import annotations

import base64
import doctest
import hashlib
import importlib
import json
import pkgutil
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from consumers.offline import report
from consumers.offline.report.build import Beside, build_page
from consumers.offline.report.facts import HIDDEN, flat
from consumers.offline.report.figure import Page
from consumers.offline.report.ledger_reading import METRICS, PHASES, LedgerReading
from consumers.offline.report.page import render
from consumers.offline.report.reading import read_run
from consumers.offline.summary import summarise
from infra.config import Config
from infra.metrics import unregistered
from schemas.ledger import Decision
from tests.fakes.tiny_run import TinyRun
from tests.fakes.told_run import Teller, decided, long_run, reading_of, step, troubled

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
VOID = frozenset({"meta", "path", "circle", "rect", "line"})
SECTIONS = ["learning", "freshness", "update", "drops", "versions", "speed", "lineage", "audit", "environment"]
ROOT = Path(__file__).resolve().parents[3]


class Strict(HTMLParser):
    """Tags must nest, and ids must be there once."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        self.words.setdefault(self.open[-1] if self.open else "", []).append(data)


def parsed(text: str) -> Strict:
    """The file, whose every tag is closed."""
    found = Strict()
    found.feed(text)
    found.close()
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    return found


def numbers(found: Strict) -> list[dict[str, Any]]:
    """The data of the plots, as the script puts them together."""
    data = json.loads(found.words["script"][0])
    return [{**figure, "labels": data["lists"][figure["labels"]]} for figure in data["figures"]]


def beside(**changes: Any) -> Beside:
    """As the command gives it, without audit and manifest."""
    config = Config().model_dump(mode="json")
    return Beside(**{"made_at_us": 0, "build": "test", "configs": [config], **changes})


def tiny_page(run: TinyRun, **changes: Any) -> Page:
    """The page of a tiny run with everything that stands beside its log."""
    audit = run.audit()
    summary = summarise(run.run_log()).to_dict()
    reading = read_run(run.run_log())
    assert reading.newest_event is not None
    manifest = run.store.fetch(reading.newest_event.manifest_uri, reading.newest_event.manifest_sha256)[1]
    return build_page(reading, beside(**{"audit": audit, "summary": summary, "manifest": manifest, **changes}))


# ---------------------------------------------------------------------- the file


def test_the_file_has_every_section_and_the_numbers_of_every_plot(tmp_path: Path) -> None:
    page = tiny_page(TinyRun(tmp_path))

    text = render(page)
    found = parsed(text)

    assert [attributes["id"] for tag, attributes in found.tags if tag == "section"] == SECTIONS
    data = numbers(found)
    drawn = [figure for figure in page.figures() if figure.has_data]
    assert [figure["id"] for figure in data] == [figure.id for figure in drawn]
    for figure in data:
        values = [value for series in figure["series"] for value in series["values"]]
        assert any(value is not None for value in values), figure["id"]
        assert all(len(series["values"]) == len(figure["labels"]) for series in figure["series"]), figure["id"]
        assert figure["title"]
        assert figure["head"]
    wanted = (
        "lag-histogram lag age age-histogram heat clip ess timeline lives workers phases latency tokens idle tree "
        "length-bias drops-by-reason drop-share entropy kl trained step-time"
    )
    assert set(wanted.split()) <= {figure.id for figure in drawn}


def test_every_plot_is_named_has_axes_and_says_what_is_missing_where_it_is_empty(tmp_path: Path) -> None:
    page = tiny_page(TinyRun(tmp_path))
    found = parsed(render(page))

    drawings = [attributes for tag, attributes in found.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(drawings) == sum(figure.has_data for figure in page.figures())
    assert all(attributes["aria-label"] for attributes in drawings)
    assert all(figure.note and figure.title and figure.empty for figure in page.figures())
    axes = [
        getattr(figure, axis) for figure in page.figures() if figure.has_data for axis in "xy" if hasattr(figure, axis)
    ]
    assert len(axes) > len(drawings)
    assert {axis.words for axis in axes} <= set(found.words["text"])
    empty = [figure.empty for figure in page.figures() if not figure.has_data]
    assert set(empty) <= set(found.words["p"])


def test_nothing_is_loaded_from_elsewhere_and_only_the_one_script_may_run(tmp_path: Path) -> None:
    text = render(tiny_page(TinyRun(tmp_path)))
    found = parsed(text)

    for tag, attributes in found.tags:
        assert not {"src", "srcset", "action", "poster", "data", "background", "ping"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert (attributes.get("href") or "#").startswith("#"), tag
        assert tag not in {"link", "iframe", "object", "embed", "img", "base", "form", "use", "image"}
    assert not re.search(r"@import|url\(", text)
    policy = next(a["content"] for t, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert ["application/json", None] == [a.get("type") for t, a in found.tags if t == "script"]


def test_the_script_and_the_style_sheet_come_with_the_package() -> None:
    declared = re.search(r"^consumers = (.*)$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)

    assert declared is not None
    for name in ("offline/report/*.css", "offline/report/*.js"):
        assert f'"{name}"' in declared.group(1)


# ---------------------------------------------------------------------- what a run may hold


def test_texts_of_the_run_are_words_and_never_markup(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    reading = read_run(run.run_log())
    group = next(iter(reading.rows.best))
    reading.rows.best[group] = replace(reading.rows.best[group], text=EVIL)
    prompts = {group: EVIL}
    policy = troubled().reading
    policy.troubles[0] = replace(policy.troubles[0], subject=EVIL, detail=EVIL)
    reading.policy.troubles[:] = policy.troubles
    reading.rows.tokens[EVIL] = reading.rows.tokens.pop("g0")
    reading.policy.lanes[EVIL] = reading.policy.lanes.pop("g0")
    reading.ledger.dropped[f"invalid:{EVIL}"] = reading.ledger.dropped.pop("duplicate")
    config = {"task": {"kind": EVIL}}

    page = build_page(replace(reading, run=EVIL, prompts=prompts), beside(configs=[config], summary_problem=EVIL))
    text = render(page)

    tags = {tag for tag, _ in parsed(text).tags}
    assert "img" not in tags
    assert text.count("<script") == 2
    assert "<img" not in text
    assert "onerror=alert(2)&gt;" in text


def test_texts_appear_only_as_the_examples_of_the_newest_step(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)

    shown = render(build_page(read_run(run.run_log()), beside()))
    hidden = render(build_page(read_run(run.run_log(), texts=False), beside()))

    assert len(re.findall("answer [01] of", shown)) == 4
    assert "answer 0 of" not in hidden
    assert "one, two:" not in hidden


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    reading = read_run(TinyRun(tmp_path).run_log())
    group = next(iter(reading.rows.best))
    reading.rows.best[group] = replace(reading.rows.best[group], text="x" * 10_000)

    assert "x" * 401 not in render(build_page(reading, beside()))


def test_secrets_of_the_configuration_are_not_in_the_report() -> None:
    config = {
        "kafka": {"bootstrap_servers": "b:9092", "security": {"sasl_plain_password": "hunter2", "ssl_cafile": "ca"}},
        "mlflow": {"uri": "https://me:hunter2@host/x", "api_key": "hunter2"},
        "checkpoints": {"root": "s3://key:hunter2@bucket"},
        "trainer": {"micro_batch_tokens": 64},
    }

    plain = flat(config)

    assert plain["kafka.security"] == plain["mlflow.api_key"] == HIDDEN
    assert plain["mlflow.uri"] == "https://host/x"
    assert plain["checkpoints.root"] == "s3://bucket"
    assert plain["trainer.micro_batch_tokens"] == "64"
    teller = Teller()
    teller.begin()
    assert "hunter2" not in render(build_page(reading_of(teller, LedgerReading()), beside(configs=[config])))


def test_a_setting_that_was_changed_shows_what_it_was_before() -> None:
    configs = [{"trainer": {"max_lag": lag}} for lag in (1, 1, 4)]
    teller = Teller()
    teller.begin()

    text = render(build_page(reading_of(teller, LedgerReading()), beside(configs=configs)))

    assert "4  (before: 1)" in text


# ---------------------------------------------------------------------- kinds of runs


def test_a_running_run_says_up_to_where_it_was_read(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, end=False)
    run.append_group(run.rows("tiny/p000005/e0/a0", "g0", 3))
    reading = read_run(run.run_log())

    page = build_page(reading, beside())

    assert page.state == "running"
    ledger, policy = reading.ledger.read_up_to, reading.policy.read_up_to
    assert f"running: read at offset {ledger} of the ledger and {policy} of policy" in page.line
    assert "2 not decided" in page.tiles[2].detail
    parsed(render(page))


def test_an_ended_run_says_how_it_ended_and_answers_the_three_questions(tmp_path: Path) -> None:
    page = tiny_page(TinyRun(tmp_path))

    assert (page.state, page.line.partition("ended ")[2]) == ("ended", "after 14.0 s: completed.")
    assert [tile.answer for tile in page.tiles] == ["0.50 \u2192 1.50", "0.33", "85.7%"]
    assert page.tiles[1].detail.startswith("training steps of policy lag, mean; at most 1 of 2 allowed")
    assert "2 dropped (2 duplicate), 0 not decided" in page.tiles[2].detail
    assert dict(page.facts)["audit"] == "0 errors, 1 notice"


def test_a_lag_above_the_limit_and_a_row_without_decision_are_marked(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    reading = read_run(run.run_log())
    reading.ledger.lags[3] = 1
    reading.rows.rows += 1

    page = build_page(reading, beside())

    assert [tile.is_bad for tile in page.tiles] == [False, True, True]


@pytest.mark.parametrize("published", [False, True])
def test_a_run_that_trained_nothing_yet_has_a_whole_page_of_empty_plots(published: bool) -> None:
    teller = Teller()
    teller.begin("g0")
    if published:
        teller.publish(0, parent=None, depth=0)

    page = build_page(reading_of(teller, LedgerReading()), beside())
    found = parsed(render(page))

    assert page.state == "running"
    assert any("Nothing is trained yet" in notice for notice in page.notices)
    assert [attributes["id"] for tag, attributes in found.tags if tag == "section"] == SECTIONS
    assert [tile.answer for tile in page.tiles] == ["-", "-", "-"]


def test_an_empty_log_is_a_run_that_has_not_started() -> None:
    page = build_page(reading_of(Teller(), LedgerReading()), beside(configs=()))

    assert page.state == "not started"
    parsed(render(page))


def test_failed_switches_and_branches_are_in_words_and_drawn() -> None:
    teller = troubled()
    ledger = LedgerReading()
    for version in (1, 2, 3, 5):
        ledger.add(step(version, [decided(Decision.DROPPED, "stale", tokens=9)], critic__rewards__mean=0.5))

    page = build_page(reading_of(teller, ledger), beside())
    text = render(page)
    data = {figure["id"]: figure for figure in numbers(parsed(text))}

    timeline = {series["name"]: series["values"] for series in data["timeline"]["series"]}
    assert [value for value in timeline["switch failed"] if value is not None] == [2.0]
    assert [value for value in timeline["branch start"] if value is not None] == [4.0]
    assert timeline["retired"][-1] == 0.0
    assert timeline["live"][-1] == 4.0
    assert data["tree"]["labels"] == ["0-3", "4-5"]
    assert data["drops-by-reason"]["series"][0]["values"] == [4.0]
    assert "In all: 2 x load failed, 1 x switch failed, 1 x worker taken out." in text
    assert "sha256 &lt;b&gt;mismatch&lt;/b&gt;" in text
    assert "version 4 goes on from version 1" in text
    assert dict(page.facts)["branches"] == "2"


@pytest.mark.parametrize(("versions", "most_kib"), [(250, 360), (1_500, 360)])
def test_the_file_stays_small_whatever_the_length_of_the_run(versions: int, most_kib: int) -> None:
    page = build_page(long_run(versions), beside())

    text = render(page)

    assert len(text.encode()) < most_kib * 1024
    assert parsed(text).ids


def test_a_run_that_does_not_add_up_still_has_a_report_that_says_so(tmp_path: Path) -> None:
    page = tiny_page(TinyRun(tmp_path), summary={}, summary_problem="14 trajectories in the log, but 11 trained")

    assert any("does not add up: 14 trajectories" in notice for notice in page.notices)
    assert page.tiles[0].answer == "-"


def test_the_metrics_of_the_report_are_registered() -> None:
    assert unregistered(METRICS) == []
    assert "whole" in PHASES


def test_a_report_is_the_same_bytes_when_made_again(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    first, again = (render(build_page(read_run(run.run_log()), beside())) for _ in range(2))

    assert first == again


def test_docstring_examples_hold() -> None:
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(report.__path__, prefix="consumers.offline.report.")
    ]
    results = [doctest.testmod(module) for module in modules]

    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) > 8
