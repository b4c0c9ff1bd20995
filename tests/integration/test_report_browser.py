"""The report in a real browser, where there is one: no word on the console, every plot answers a pointer.

Chromium is looked for on the PATH. The browser is driven by a second script in a copy of the file whose content policy
is taken off (the policy would refuse it, which is a test of its own). Pictures are kept in build/report/.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from consumers.offline.report.build import Beside, build_page
from consumers.offline.report.page import render
from consumers.offline.report.reading import read_run
from consumers.offline.summary import summarise
from infra.config import Config
from tests.fakes.tiny_run import TinyRun
from tests.fakes.told_run import long_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEPT = Path(__file__).resolve().parents[2] / "build" / "report"
LIMIT_S = 120
DRIVER = """
addEventListener("error", (event) => console.log("CAUGHT " + event.message));
for (const details of document.querySelectorAll("details")) details.open = true;
setTimeout(() => {
  const told = {tips: {}, tables: {}, wired: document.documentElement.dataset.figures};
  told.empty = [...document.querySelectorAll(".card.empty")].map((card) => card.id);
  for (const svg of document.querySelectorAll("svg[role=img]")) {
    const box = svg.getBoundingClientRect();
    const card = svg.closest(".card");
    const at = {clientX: box.left + box.width / 2, clientY: box.top + 20, bubbles: true};
    svg.dispatchEvent(new PointerEvent("pointermove", at));
    told.tips[card.id] = document.getElementById("tip").hidden ? "" : document.getElementById("tip").textContent;
    svg.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true, cancelable: true}));
    svg.dispatchEvent(new PointerEvent("pointerleave"));
    told.tables[card.id] = card.querySelectorAll(".numbers td").length;
  }
  const out = document.createElement("output");
  out.textContent = JSON.stringify(told);
  document.body.append(out);
}, 50);
"""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)"),
]


def chromium(tmp_path: Path, page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Open a file, without a screen; what it says on the console comes on stderr."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", *arguments, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page said, refusals of the content policy included."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture
def report(tmp_path: Path) -> str:
    """A tiny run with every kind of plot that it can fill."""
    run = TinyRun(tmp_path / "store")
    beside = Beside(
        made_at_us=0, build="test", audit=run.audit(), configs=[Config().model_dump(mode="json")],
        summary=summarise(run.run_log()).to_dict(),
    )  # fmt: skip
    return render(build_page(read_run(run.run_log()), beside))


def test_the_file_opens_without_a_word_on_the_console_and_a_picture_is_kept(tmp_path: Path, report: str) -> None:
    page = tmp_path / "report.html"
    page.write_text(report, encoding="utf-8")
    KEPT.mkdir(parents=True, exist_ok=True)

    done = chromium(tmp_path, page, "--window-size=1240,6000", f"--screenshot={KEPT / 'tiny.png'}")

    assert console(done) == []
    assert (KEPT / "tiny.png").stat().st_size > 50_000


def test_every_plot_has_data_on_a_page_answers_a_pointer_and_shows_its_numbers(tmp_path: Path, report: str) -> None:
    long = render(build_page(long_run(300), Beside(made_at_us=0, build="test")))

    tiny_has, tiny_lacks = drive(tmp_path, report)
    long_has, long_lacks = drive(tmp_path, long)

    # A run without evaluations has no such figure at all; every other one is on both pages, and drawn on one of them.
    assert tiny_has | tiny_lacks == long_has | long_lacks == tiny_has | long_has
    assert len(tiny_has | long_has) > 25


def drive(tmp_path: Path, report: str) -> tuple[set[str], set[str]]:
    """Point at every plot of a page: the figures that are drawn, and those that say why they are empty."""
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report)
    page = tmp_path / "driven.html"
    page.write_text(free.replace("</body>", f"<script>{DRIVER}</script></body>"), encoding="utf-8")

    done = chromium(tmp_path, page, "--dump-dom")

    assert console(done) == []
    answer = re.search(r"<output>(.*?)</output>", done.stdout, re.DOTALL)
    assert answer is not None
    told = json.loads(html.unescape(answer.group(1)))
    assert int(told["wired"]) == len(told["tables"]) > 15
    assert [card for card, cells in told["tables"].items() if not cells] == []
    without_axis = {"f-phases", "f-tree", "f-lives", "f-drops-by-reason"}
    assert {card for card, words in told["tips"].items() if not words} <= without_axis
    return set(told["tables"]), set(told["empty"])


def test_a_script_that_was_smuggled_in_is_refused(tmp_path: Path, report: str) -> None:
    page = tmp_path / "smuggled.html"
    smuggled = report.replace("</main>", '<script>document.title = "stolen"</script></main>')
    page.write_text(smuggled, encoding="utf-8")

    done = chromium(tmp_path, page, "--dump-dom")

    assert "<title>stolen</title>" not in done.stdout
    assert any("Content Security Policy" in line for line in console(done))
    assert 'data-figures="' in done.stdout
