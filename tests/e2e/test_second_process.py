"""A second trainer or coordinator by mistake: the newer one works, the older one ends with 3 and says why."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.e2e.driving import Site, command, environment, going, leftovers, wait_for_version, wait_until

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("service", "verb"), [("trainer", "train"), ("coordinator", "coordinate")])
def test_the_older_of_two_is_fenced_for_good_and_the_run_says_so(site: Site, service: str, verb: str) -> None:
    words = site.folder / "second.txt"
    with going(site, "run.versions=500") as first:
        wait_for_version(site, 1)
        with words.open("w") as stream:
            second = subprocess.Popen(
                command(verb, "--config", str(site.run().path / "config.json")),
                env=environment(), stdout=stream, stderr=stream,
            )  # fmt: skip
        try:
            code = first.wait(timeout=60.0)
            still_works = second.poll() is None
        finally:
            second.send_signal(signal.SIGKILL)
            second.wait(timeout=30.0)
    said = (site.folder / "up-tiny.txt").read_text()
    ended = [line for line in (site.run().logs / "up.log").read_text().splitlines() if "service_ended" in line]
    wait_until(lambda: leftovers(site) == [], "everything to end", 30.0)

    assert code == 1
    assert f"another {service} took over this run" in said
    assert "newer" in said
    assert any(f"service={service} " in line and "code=3 verdict=fenced" in line for line in ended), ended
    assert still_works, words.read_text()
