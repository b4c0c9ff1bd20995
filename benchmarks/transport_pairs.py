"""Two processes, one sends groups and the other reads and checks them: groups a second, CPU time, latency.

Both ends do a service's whole work: checked trajectories -> bytes -> transport -> bytes -> checked trajectories.
"""

from __future__ import annotations

import json
import multiprocessing
import queue as queues
import random
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_codec import VOCABULARY, codecs, make_group
from benchmarks.transport_ends import Peer, Where
from benchmarks.transport_peers import PEERS, missing
from benchmarks.transport_redis import free_port, redis_server
from infra.kafka_admin import KafkaLogAdmin
from infra.kafka_clients import KafkaSettings, quiet_client_loggers
from schemas.ids import RunId
from schemas.trajectory import Trajectory

LIMIT_S = 60.0
"""of one peer's round"""
WARM_UP_S = 1.0
"""a reader polls that long before anything is sent; latencies of that long after the first group are left out"""
DISTINCT = 32
"""groups that differ, more than a batch of the broker holds: a batch of one group many times compresses to that one"""
_STAMP = struct.Struct("<q")
_PRELOADED = ("benchmarks.bench_codec", "benchmarks.transport_peers", "infra.kafka_writer", "infra.kafka_reader")


def distinct_groups(count: int = DISTINCT) -> list[list[Trajectory]]:
    """Groups of the stated size with tokens and log-probabilities of their own."""
    rng = np.random.default_rng(0)

    def drawn(t: Trajectory) -> Trajectory:
        size = len(t.token_ids)
        tokens = rng.integers(0, VOCABULARY, size, dtype=np.int32)
        return replace(t, token_ids=tokens, logprobs=-rng.random(size, dtype=np.float32))

    return [[drawn(t) for t in make_group()] for _ in range(count)]


def _codec(peer: Peer, rows: Sequence[Any]) -> Any:
    return next(codec for codec in codecs(rows) if codec.name == peer.codec)


def send(peer_index: int, at: Where, slow: int, per_s: float, fast: int, ready: Any, quiet: Any, results: Any) -> None:
    """The sending process: `slow` groups at `per_s` a second, then `fast` ones as quickly as they go."""
    quiet_client_loggers()
    peer, groups = PEERS[peer_index], distinct_groups()
    codec = _codec(peer, groups[0])
    sender = peer.sender(at)
    ready.wait(LIMIT_S)
    begun_s = time.monotonic()
    for number in range(slow):
        time.sleep(max(0.0, begun_s + number / per_s - time.monotonic()))
        sender.send(_STAMP.pack(time.monotonic_ns()) + codec.encode(groups[number % DISTINCT]))
    quiet.wait(LIMIT_S)
    cpu_s = time.process_time()
    for number in range(fast):
        sender.send(_STAMP.pack(time.monotonic_ns()) + codec.encode(groups[number % DISTINCT]))
    sender.close()
    results.put(("send", {"cpu_s": time.process_time() - cpu_s}))


def receive(peer_index: int, at: Where, slow: int, fast: int, ready: Any, quiet: Any, results: Any) -> None:
    """The receiving process."""
    quiet_client_loggers()
    peer = PEERS[peer_index]
    codec = _codec(peer, make_group())
    receiver = peer.receiver(at)
    connected_s = time.monotonic() + WARM_UP_S
    while time.monotonic() < connected_s:
        receiver.poll()  # a client connects while it is asked
    ready.set()
    latencies_s: list[float] = []
    got, begun_ns, cpu_s = 0, 0, 0.0
    deadline_s = time.monotonic() + LIMIT_S
    while got < slow + fast and time.monotonic() < deadline_s:
        for message in receiver.poll():
            sent_ns = _STAMP.unpack(message[:8])[0]
            codec.decode(message[8:])
            got += 1
            if got <= slow:
                latencies_s.append((time.monotonic_ns() - sent_ns) / 1e9)
            elif got == slow + 1:
                begun_ns = sent_ns
        if got == slow and not quiet.is_set():
            cpu_s = time.process_time()
            quiet.set()
    seconds = (time.monotonic_ns() - begun_ns) / 1e9
    found = {"got": got - slow, "seconds": seconds, "cpu_s": time.process_time() - cpu_s, "latencies_s": latencies_s}
    receiver.close()
    results.put(("receive", found))


def one_round(context: Any, peer: Peer, at: Where, slow: int, per_s: float, fast: int) -> dict[str, Any]:
    """Both processes, to their end. `failed` says why a round has no figures."""
    ready, quiet, results = context.Event(), context.Event(), context.Queue()
    index = PEERS.index(peer)
    pair = [
        context.Process(target=receive, args=(index, at, slow, fast, ready, quiet, results)),
        context.Process(target=send, args=(index, at, slow, per_s, fast, ready, quiet, results)),
    ]
    for process in pair:
        process.start()
    found: dict[str, Any] = {}
    deadline_s = time.monotonic() + 2 * LIMIT_S
    while len(found) < 2 and time.monotonic() < deadline_s and not any(process.exitcode for process in pair):
        try:
            end, figures = results.get(timeout=0.5)
            found[end] = figures
        except queues.Empty:
            continue
    for process in pair:
        process.join(10.0)
        if process.is_alive():
            process.kill()
    if len(found) < 2 or found["receive"]["got"] < fast:
        codes = [process.exitcode for process in pair]
        return {"failed": f"{found.get('receive', {}).get('got', 0)} of {fast} groups came, exit codes {codes}"}
    both = found["receive"]
    steady = sorted(both["latencies_s"][int(WARM_UP_S * per_s) :])
    return {
        "groups_per_s": fast / both["seconds"],
        "cpu_us_a_group": 1e6 * (both["cpu_s"] + found["send"]["cpu_s"]) / fast,
        "latency_ms_p50": 1e3 * statistics.median(steady),
        "latency_ms_p99": 1e3 * steady[min(len(steady) - 1, int(0.99 * len(steady)))],
    }


def compare(bootstrap: str, *, rounds: int, fast: int, seconds: float, per_s: float) -> dict[str, Any]:
    """Every peer in every round, in a new order each time; the medians, and each peer's ratio to ours by round."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    found: dict[str, list[dict[str, Any]]] = {}
    left_out: dict[str, str] = {}
    with redis_server() as redis_port, tempfile.TemporaryDirectory(prefix="bench-transport-") as directory:
        for peer in PEERS:
            if reason := missing(peer, redis_port):
                left_out[peer.name] = reason
                print(f"left out: {peer.name}: {reason}", file=sys.stderr)
        shared = [peer for peer in PEERS if peer.name not in left_out]
        for round_ in range(rounds):
            for peer in random.Random(round_).sample(shared, len(shared)):
                at = Where(
                    name=f"r{round_}-{PEERS.index(peer)}", bootstrap=bootstrap, redis_port=redis_port,
                    free_port=free_port(), directory=Path(directory), queue=context.Queue(),
                )  # fmt: skip
                if peer.codec == "arrow":
                    admin = KafkaLogAdmin(KafkaSettings(bootstrap_servers=bootstrap))
                    admin.create_topics(RunId(at.name))
                    admin.close()
                figures = one_round(context, peer, at, int((WARM_UP_S + seconds) * per_s), per_s, fast)
                print(f"{peer.name} {round_}: {json.dumps(figures)}", file=sys.stderr, flush=True)
                found.setdefault(peer.name, []).append(figures)
    return {"peers": summary(found), "left_out": left_out, "rounds": rounds, "groups": fast, "paced_per_s": per_s}


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians of a peer's rounds, and the median over rounds of (this peer / driftlog in the same round)."""
    told: dict[str, dict[str, Any]] = {}
    for peer in PEERS:
        rounds = found.get(peer.name, [])
        good = [one for one in rounds if "failed" not in one]
        if not good:
            if rounds:
                told[peer.name] = {"failed": rounds[-1]["failed"]}
            continue
        medians = {name: round(statistics.median(one[name] for one in good), 2) for name in good[0]}
        pairs = zip(rounds, found.get(PEERS[0].name, []), strict=False)
        ratios = [one["groups_per_s"] / ours["groups_per_s"] for one, ours in pairs if "failed" not in {**one, **ours}]
        told[peer.name] = {
            **medians, "codec": peer.codec, "keeps": peer.keeps, "rounds": len(good),
            "throughput_to_driftlog": round(statistics.median(ratios), 2) if ratios else None,
        }  # fmt: skip
    return told
