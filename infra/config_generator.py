"""The table of the configuration that decides how completions are sampled and weights are taken over."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infra.config_section import Section


class GeneratorSection(Section):
    """[generator]"""

    workers: int = Field(default=2, ge=1)
    """generator processes `driftlog up` starts"""
    engine: Literal["hf", "vllm"] = "hf"
    """hf: transformers, on any machine; vllm: continuous batching, set up in [vllm]"""
    batching: Literal["group", "mixed"] = "mixed"
    """of engine hf. group: a group's bytes depend only on weights and request; mixed: several groups a batch, faster"""
    max_groups_in_flight: int = Field(default=16, ge=1)
    """per worker"""
    threads: int = Field(default=1, ge=1)
    heartbeat_s: float = Field(default=1.0, gt=0)
    park_timeout_s: float = Field(default=1.0, ge=0)
    """a request for a version not held yet waits this long before it is taken under an older, allowed one"""
    in_flight: Literal["finish", "keep"] = "finish"
    """finish: running groups end before a switch; keep: they go on under the new weights, as a new segment"""
    poison_after: int = Field(default=2, ge=1)
    """a request that this many dead workers held is not generated again"""
    drain_timeout_s: float = Field(default=10.0, ge=0)
    """longest wait for running groups before a switch"""
    fetch_timeout_s: float = Field(default=60.0, ge=0)
    """how long a checkpoint may stay invisible (network file systems show it late); with drain_timeout_s, where running
    groups finish, below coordinator.switch_deadline_s"""
    load_tries: int = Field(default=2, ge=1)
    probe_tolerance: float | None = Field(default=None, gt=0)
    """max |log-probability difference|; unset: by dtype (float32 1e-4, bfloat16 0.5)"""
    keep_text: bool = True
    """store decoded completions (personal data)"""

    def tolerance(self, dtype: str) -> float:
        """probe_tolerance with its default filled in."""
        if self.probe_tolerance is not None:
            return self.probe_tolerance
        # Half precision rounds a logit of 20 to 1/8: 0.30 was seen through 30 layers between sound worker and trainer.
        return 1e-4 if dtype == "float32" else 0.5


def generator_problems(generator: GeneratorSection, *, switch_deadline_s: float, group_timeout_s: float) -> list[str]:
    """Waits of a worker that would outlast what others grant it, each with its inequality and the way out."""
    found = []
    waits = {"generator.fetch_timeout_s": generator.fetch_timeout_s}
    if generator.in_flight == "finish":
        waits["generator.drain_timeout_s"] = generator.drain_timeout_s
    longest_s = sum(waits.values())
    if longest_s >= switch_deadline_s:
        found.append(
            f"{' + '.join(waits)} = {longest_s:g} >= coordinator.switch_deadline_s = {switch_deadline_s:g}: a worker "
            "would be expired while it may still wait for the checkpoint or for its running groups; raise the last one "
            "above that by the time of a load"
        )
    if generator.park_timeout_s >= group_timeout_s:
        found.append(
            f"generator.park_timeout_s = {generator.park_timeout_s:g} >= trainer.group_timeout_s = "
            f"{group_timeout_s:g}: a group would be given up while its request waits for newer weights; lower the first"
        )
    return found
