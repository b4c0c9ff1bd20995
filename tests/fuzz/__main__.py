"""Fuzz every decoder with damaged stored messages. The last line is `RESULT {json}`; exit 1 on any finding.

python -m tests.fuzz --records 100000 --seed 0
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.fuzz.drill import Drill, Memory

MEMORY_LIMIT_MB = 256.0
"""how far peak memory may rise; one record is at most 32 MiB"""
_WARM_UP = 2000


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the decoders.")
    parser.add_argument("--records", type=int, default=100_000, help="damaged messages (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other damage (default: %(default)s)")
    options = parser.parse_args(arguments)
    Drill(options.seed + 1_000_000).run(_WARM_UP)
    before, cpu_s, started_s = Memory.now(), time.process_time(), time.perf_counter()
    tally = Drill(options.seed).run(options.records)
    after = Memory.now()
    grown_mb = after.rss_mb - before.rss_mb
    for words in [*tally.untyped[:10], *tally.misused[:10]]:
        sys.stdout.write(words + "\n")
    result = {
        "records": tally.records, "accepted": tally.accepted, "refused": tally.refused,
        "kinds_of_refusal": len(tally.codes), "untyped_errors": len(tally.untyped),
        "rows_of_refused_records_used": len(tally.misused), "memory_grown_mb": round(grown_mb, 1),
        "arrow_peak_mb": round(after.arrow_mb, 2), "slowest_ms": round(tally.slowest_ms, 1),
        "cpu_s": round(time.process_time() - cpu_s, 1), "wall_s": round(time.perf_counter() - started_s, 1),
    }  # fmt: skip
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")
    return 1 if tally.untyped or tally.misused or grown_mb > MEMORY_LIMIT_MB else 0


if __name__ == "__main__":
    sys.exit(main())
