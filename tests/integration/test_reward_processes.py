"""User code as a reward: whatever it does is a reward or a failure with its cause, and nothing waits for ever."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from infra.config_task import RewardEntry
from infra.ports import Reward
from infra.reward_loading import SHIPPED
from infra.reward_processes import ProcessScorer, RewardProcessSettings
from schemas.errors import ConfigError
from tests.unit.policy.test_rewards import completion, request

LIMIT_S = 30.0
ROOT = Path(__file__).resolve().parents[2]

CODE = """
import os, ctypes, time

def by_text(request, completion):
    text = completion.text
    if text == "exit": os._exit(7)
    if text == "leave": raise SystemExit
    if text == "segfault": ctypes.string_at(0)
    if text == "raise": raise ValueError("no judge")
    if text == "loop":
        while True: pass
    if text == "none": return None
    if text == "text": return "1.0"
    if text == "nan": return float("nan")
    if text == "print": print("noise", flush=True)
    if text == "parts": return 0.5, {"half": 0.5}
    return float(len(request.reference)) + completion.index_in_group

def batched(request, completions):
    if completions[0].text == "short": return [1.0]
    if completions[0].text == "exit": os._exit(7)
    return [float(len(completions))] * len(completions)

async def patient(request, completion):
    import asyncio
    await asyncio.sleep(0.3 if completion.text != "for ever" else 3600)
    if completion.text == "raise": raise ValueError("no judge")
    return 1.0

def weighty(request, completion, factor=1.0):
    return 2.0 * factor
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "own_reward.py"
    path.write_text(dedent(CODE))
    return path


@contextmanager
def scorer(code: Path, *names: str, timeout_s: float = 5.0, **arguments: float) -> Iterator[ProcessScorer]:
    entries = tuple(RewardEntry(name=name if name in SHIPPED else f"{code}:{name}") for name in names)
    if arguments:
        entries = tuple(entry.model_copy(update={"arguments": arguments}) for entry in entries)
    made = ProcessScorer(RewardProcessSettings(entries=entries, processes=1, timeout_s=timeout_s))
    try:
        yield made
    finally:
        made.close()


def score(at: ProcessScorer, *texts: str) -> Sequence[Reward]:
    return at.submit(request(answer="x"), [completion(text) for text in texts]).result(LIMIT_S)


def test_a_function_of_ones_own_scores_each_completion_and_names_its_version(code: Path) -> None:
    with scorer(code, "by_text") as at:
        found = score(at, "a", "parts", "print", "b")

        assert [1.0, 0.5, 1.0, 1.0] == [reward.value for reward in found]
        assert {"half": 0.5} == found[1].parts
        assert at.name.startswith(f"{code}:by_text@")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("exit", "crash: the reward ended its process with exit code 7"),
        ("leave", "crash: the reward ended its process with exit code 0"),
        ("segfault", "crash: the reward ended its process by SIGSEGV"),
        ("raise", "ValueError: no judge"),
        ("loop", "time-out: the reward took longer than 0.5 s"),
        ("none", "the reward is None"),
        ("text", "the reward is no number: TypeError: '1.0' is text"),
        ("nan", "the reward is nan"),
    ],
)
def test_what_user_code_does_wrong_is_a_failure_of_that_completion_alone(code: Path, text: str, cause: str) -> None:
    with scorer(code, "by_text", timeout_s=0.5) as at:
        found = score(at, "a", text, "b")
        after = score(at, "c")

    assert [1.0, None, 1.0] == [reward.value for reward in found]
    assert cause in str(found[1].error)
    assert [1.0] == [reward.value for reward in after]


def test_a_group_that_is_cut_off_twice_is_given_up(code: Path) -> None:
    with scorer(code, "by_text") as at:
        found = score(at, "exit", "a", "exit", "b", "c")

    assert [None, 1.0, None, None, None] == [reward.value for reward in found]
    assert "not scored: the reward was cut off 2 times" in str(found[4].error)


def test_a_batched_function_gets_the_group_and_must_answer_for_all_of_it(code: Path) -> None:
    with scorer(code, "batched") as at:
        assert [3.0, 3.0, 3.0] == [reward.value for reward in score(at, "a", "b", "c")]
        wrong_count = score(at, "short", "b", "c")
        crashed = score(at, "exit", "b")

    assert ["a batched reward returned 1 values for 3 completions"] * 3 == [reward.error for reward in wrong_count]
    assert [None, None] == [reward.value for reward in crashed]


def test_an_async_function_judges_a_group_at_once(code: Path) -> None:
    with scorer(code, "patient", timeout_s=3.0) as at:
        found = score(at, *["a"] * 20, "raise")  # one after another they would take 6 s

    assert [1.0] * 20 == [reward.value for reward in found[:20]]
    assert "ValueError: no judge" == found[20].error


def test_an_aborted_completion_is_not_shown_to_user_code(code: Path) -> None:
    with scorer(code, "by_text") as at:
        found = at.submit(request(), [completion("exit", "abort"), completion("a")]).result(LIMIT_S)

    assert [None, 0.0] == [reward.value for reward in found]


def test_arguments_reach_the_function_by_name(code: Path) -> None:
    with scorer(code, "weighty", factor=3.0) as at:
        assert 6.0 == score(at, "a")[0].value


def test_several_rewards_are_added_up_and_logged_by_name(code: Path) -> None:
    with scorer(code, "by_text", "length") as at:
        found = score(at, "a", "exit")

    assert 1.0 - 1 / 16 == found[0].value
    assert {f"{code}:by_text": 1.0, "length": -1 / 16} == found[0].parts
    assert found[1].value is None
    assert at.name.endswith("+1*length@1")


def test_a_reward_that_cannot_be_loaded_is_refused_at_the_start(code: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos._exit(9)\n")
    with pytest.raises(ConfigError, match="has no function 'nothing'"), scorer(code, "nothing"):
        pass
    words = "crash: loading the reward ended its process with exit code 9"
    with pytest.raises(ConfigError, match=words), scorer(broken, "f"):
        pass


def test_code_that_changes_under_a_run_is_not_taken_for_the_old_one(code: Path) -> None:
    with scorer(code, "by_text") as at:
        assert 1.0 == score(at, "a")[0].value
        code.write_text(code.read_text() + "\nOTHER = 1\n")
        score(at, "exit")
        (found,) = score(at, "a")
        (again,) = score(at, "a")

    assert "the reward's code changed while the run goes on" in str(found.error)
    assert "the reward process does not start: the reward's code changed" in str(again.error)


def test_a_defect_of_ours_is_a_failure_and_does_not_stop_the_scoring(code: Path) -> None:
    unspeakable = request(answer=object())  # type: ignore[arg-type]

    with scorer(code, "by_text") as at:
        (found,) = at.submit(unspeakable, [completion("a")]).result(LIMIT_S)
        (after,) = score(at, "a")

    assert "not scored: TypeError" in str(found.error)
    assert 1.0 == after.value


def test_a_machine_without_room_for_a_process_is_said_so(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scorer(code, "by_text") as at:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        found = score(at, "exit", "a")

    assert "exit code 7" in str(found[0].error)
    assert "No such file or directory" in str(found[1].error)


def test_closing_does_not_wait_for_code_that_loops(code: Path) -> None:
    with scorer(code, "by_text", timeout_s=3600.0) as at:
        future = at.submit(request(), [completion("loop")])
        process = at.processes[0]
        at.close()

    assert not future.done() or future.result()[0].value is None
    assert not process.is_running()


def test_the_folder_of_user_code_stands_behind_ours_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "infra.py").write_text("raise RuntimeError('taken for ours')\n")
    own = tmp_path / "own.py"
    own.write_text("import infra.rewards\n\ndef f(request, completion):\n    return 1.0\n")

    with scorer(own, "f") as at:
        assert 1.0 == score(at, "a")[0].value


PARENT = """
import sys
from infra.config_task import RewardEntry
from infra.reward_processes import ProcessScorer, RewardProcessSettings
from tests.unit.policy.test_rewards import completion, request

entries = (RewardEntry(name=sys.argv[1] + ":by_text"),)
scorer = ProcessScorer(RewardProcessSettings(entries=entries, processes=1, timeout_s=3600.0))
scorer.submit(request(), [completion("a")]).result(30)
scorer.submit(request(), [completion("loop")])
print(scorer.processes[0].pid, flush=True)
sys.stdin.read()
"""


def test_a_process_that_loops_dies_with_a_generator_that_is_killed(code: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(code)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(LIMIT_S)
    try:
        ended, _, _ = select.select([worker], [], [], LIMIT_S)
    finally:
        os.close(worker)

    assert [worker] == ended
