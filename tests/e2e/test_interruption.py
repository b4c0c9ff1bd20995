"""A run that is interrupted, resumed and extended; a poison record on the way; Ctrl-C leaves nothing running."""

from __future__ import annotations

import hashlib
import signal

from driftlog.broker_access import kafka_settings, reading_broker
from driftlog.run_reading import opened
from infra import local_broker
from infra.kafka_writer import KafkaEventWriter
from infra.ports import Message
from schemas.ids import RunId
from schemas.topics import TopicName, topic
from tests.e2e.driving import Site, going, leftovers, up, wait_for_version

POISON = b"this is no Arrow stream \x00\xff"


def test_poison_goes_to_dead_letters_and_an_interrupted_run_resumes(site: Site) -> None:
    with going(site, "run.versions=500") as process:
        wait_for_version(site, 2)
        _send_poison(site)
        wait_for_version(site, 5)

        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=60) == 0
    assert leftovers(site) == []
    reached = _newest_version(site)
    assert 5 <= reached < 500

    done = up(site, f"run.versions={reached + 3}")

    assert done.returncode == 0, done.stderr
    summary = site.summary()
    assert summary["versions_trained"] == reached + 3
    assert (summary["refused_records"], summary["undecided"], summary["audit_findings"]) == (1, 0, 0)
    assert summary["trajectories_trained"] + sum(summary["dropped"].values()) == summary["trajectories_in_log"]
    letters = _dead_letters(site)
    assert letters == [("tiny.trajectories", hashlib.sha256(POISON).hexdigest())]


def test_kill_minus_9_of_up_leaves_nothing_running(site: Site) -> None:
    with going(site, "run.versions=500") as process:
        wait_for_version(site, 1)

        process.kill()
        process.wait(timeout=10)
    # `going` waits until everything that worked on this site is gone.
    assert leftovers(site) == []


def _send_poison(site: Site) -> None:
    config = site.run().stored_config()
    handle = local_broker.status(site.run().broker)
    assert config is not None
    assert handle is not None
    writer = KafkaEventWriter(kafka_settings(config, handle.bootstrap_servers))
    delivery = writer.send(
        Message(topic=topic(RunId("tiny"), TopicName.TRAJECTORIES), key=b"tiny/p000001/e0/a0", value=POISON)
    )
    delivery.result(10.0)
    assert writer.close(5.0) == 0


def _newest_version(site: Site) -> int:
    lines = (site.run().logs / "trainer.log").read_text().splitlines()
    published = [line for line in lines if "version_published" in line]
    return int(published[-1].partition("policy_version=")[2].split()[0])


def _dead_letters(site: Site) -> list[tuple[str, str]]:
    config = site.run().stored_config()
    assert config is not None
    with reading_broker(config, site.run()) as bootstrap:
        log = opened(config, site.run(), bootstrap).log()
        return [(letter.topic, letter.value_sha256) for letter in log.dead_letters()]
