"""The lineage of one version: its parents down to 0, its step, what that was trained on, and what was sampled by it.

Rows are streamed from the version's step to the end of the ledger; what retention removed is told and the rest stands.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from consumers.offline.lineage import Lineage, Node, read_lineage
from consumers.offline.run_log import RunLog
from consumers.offline.trace.words import proof_facts, seconds, when
from consumers.offline.trained_steps import TrainedStep, trained_steps
from consumers.trainer.admission import trained_versions
from schemas.errors import IllegalState, UsageError
from schemas.policy_events import VersionLoaded
from schemas.trajectory import Trajectory

MOST_GROUPS_SHOWN = 8


@dataclass(slots=True, kw_only=True)
class GroupSource:
    """One group of the step's batch."""

    group_id: str
    trained: int = 0
    """rows"""
    replayed: int = 0
    policy_lag: int = 0
    """the largest"""
    rewards: list[float] = field(default_factory=list)
    sampled_by: dict[str, list[int]] = field(default_factory=dict)
    """worker/incarnation -> versions"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLineage:
    """The answer."""

    run: str
    node: Node
    parents: Sequence[Node]
    """from its parent down to version 0"""
    children: Sequence[int]
    """versions made from it"""
    groups: Sequence[GroupSource]
    sampled_under: Mapping[int, int]
    """version -> rows of the batch with a trained token of it"""
    workers: Mapping[str, Mapping[int, Mapping[str, Any]]]
    """worker/incarnation -> policy offset -> its proof, for every proof that a row of the batch stands on"""
    own_proofs: Sequence[Mapping[str, Any]]
    """of workers that proved this version"""
    trained_on_its_samples: Mapping[int, int]
    """later version -> rows of its batch with a trained token that this version sampled"""
    notes: Sequence[str]
    """what cannot be told, and why"""

    def to_json(self) -> str:
        """One JSON object."""
        content = {
            "run": self.run,
            **self.node.to_dict(),
            "parents": [_parent(node) for node in self.parents],
            "children": list(self.children),
            "sources": [asdict(group) for group in self.groups],
            "sampled_under": dict(self.sampled_under),
            "workers": {name: dict(proofs) for name, proofs in self.workers.items()},
            "own_proofs": list(self.own_proofs),
            "trained_on_its_samples": dict(self.trained_on_its_samples),
            "notes": list(self.notes),
        }
        return json.dumps(content, indent=2)

    def text(self) -> str:
        """For a person."""
        node = self.node
        pinned = ", pinned" if node.is_pinned else ""
        lines = [
            f"version {node.version} of run {self.run}: depth {node.depth}, {node.status}{pinned}",
            f"  published {when(node.published_at_us)} (policy@{node.policy_offset})",
            f"  {node.manifest_uri}, sha256 {node.manifest_sha256[:16]}..., {node.bytes:,} bytes",
            f"  optimizer step {node.optimizer_step}{'' if node.has_state else ', without its state'}",
            *_life_lines(node),
            *_step_lines(node),
            *self._source_lines(),
            f"  parents: {_line_words(self.parents) or 'none: it is the first'}",
        ]
        if self.children:
            lines.append(f"  versions made from it: {', '.join(map(str, self.children))}")
        lines += [
            f"  proven by {proof['worker']}/{proof['incarnation']}: {proof['words']}" for proof in self.own_proofs
        ]
        if self.trained_on_its_samples:
            later = ", ".join(f"{version} ({rows} rows)" for version, rows in self.trained_on_its_samples.items())
            lines.append(f"  versions trained on what it sampled: {later}")
        else:
            lines.append("  no version was trained on what it sampled")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _source_lines(self) -> list[str]:
        lines = []
        for group in self.groups[:MOST_GROUPS_SHOWN]:
            workers = "; ".join(f"{w} under {_numbers(v)}" for w, v in group.sampled_by.items())
            uses = f"{group.trained} rows" + (f", {group.replayed} used again" if group.replayed else "")
            mean = f", mean reward {sum(group.rewards) / len(group.rewards):.3g}" if group.rewards else ""
            lines.append(f"    {group.group_id}: {uses}, lag {group.policy_lag}{mean}; {workers or 'rows not read'}")
        if len(self.groups) > MOST_GROUPS_SHOWN:
            lines.append(f"    ... and {len(self.groups) - MOST_GROUPS_SHOWN} more groups (--json has all)")
        for worker, proofs in self.workers.items():
            for proof in proofs.values():
                lines.append(f"  sampled by {worker} under version {proof.get('version', '?')}: {proof['words']}")
        return lines


def version_lineage(run_log: RunLog, version: int) -> VersionLineage:
    """UsageError for a version that was never published."""
    lineage = read_lineage(run_log)
    node = lineage.nodes.get(version)
    if node is None:
        raise UsageError(f"version {version}: run {run_log.run} has versions 0 to {lineage.newest}")
    sources = _Sources()
    notes: list[str] = []
    later: Counter[int] = Counter()
    try:
        with closing(trained_steps(run_log, first=version)) as steps:
            for step in steps:
                made = step.control.version_out
                if made == version:
                    sources.add(step)
                later[made] += sum(version in _versions(row) for row in step.rows if row is not None)
    except IllegalState as error:
        notes.append(f"what was sampled is told only as far as the log reaches: {error}")
    if node.step is not None and not sources.groups:
        sources.add_ids(node.step.groups)
    return VersionLineage(
        run=run_log.run,
        node=node,
        parents=[lineage.nodes[parent] for parent in lineage.line(version)[1:]],
        children=lineage.children()[version],
        groups=list(sources.groups.values()),
        sampled_under=dict(sorted(sources.sampled_under.items())),
        workers=_workers(sources, lineage),
        own_proofs=[
            proof_facts(entry.offset, entry)
            for entry in lineage.entries
            if isinstance(entry.event, VersionLoaded) and entry.is_legal and entry.event.version == version
        ],
        trained_on_its_samples={made: rows for made, rows in sorted(later.items()) if rows},
        notes=[*notes, *sources.problems],
    )


class _Sources:
    """What one batch was made of."""

    def __init__(self) -> None:
        self.groups: dict[str, GroupSource] = {}
        self.sampled_under: Counter[int] = Counter()
        self.proofs: defaultdict[str, set[int]] = defaultdict(set)
        self.problems: list[str] = []

    def add(self, step: TrainedStep) -> None:
        for decision, row in zip(step.decisions, step.rows, strict=True):
            group = self.groups.setdefault(decision.group_id or "?", GroupSource(group_id=decision.group_id or "?"))
            again = decision.use_count > 1
            group.replayed += again
            group.trained += not again
            group.policy_lag = max(group.policy_lag, decision.policy_lag or 0)
            group.rewards += [] if decision.reward is None else [decision.reward]
            if row is None:
                continue
            worker = f"{row.worker_id}/{row.incarnation}"
            versions = _versions(row)
            self.sampled_under.update(versions)
            self.proofs[worker].update(proof for _, proof in trained_versions(row))
            known = group.sampled_by.setdefault(worker, [])
            known += sorted(versions - set(known))
        self.problems += [str(problem) for problem in step.problems]

    def add_ids(self, group_ids: Sequence[str]) -> None:
        """Where no row can be read: the ledger still names the groups."""
        self.groups = {group_id: GroupSource(group_id=group_id) for group_id in group_ids}


def _versions(row: Trajectory) -> set[int]:
    return {version for version, _ in trained_versions(row)}


def _workers(sources: _Sources, lineage: Lineage) -> dict[str, dict[int, dict[str, Any]]]:
    by_offset = {entry.offset: entry for entry in lineage.entries}
    return {
        worker: {
            offset: _with_switch(proof_facts(offset, by_offset.get(offset)), by_offset) for offset in sorted(offsets)
        }
        for worker, offsets in sorted(sources.proofs.items())
    }


def _with_switch(facts: dict[str, Any], by_offset: Mapping[int, Any]) -> dict[str, Any]:
    entry = by_offset.get(facts["policy_offset"])
    event = None if entry is None else entry.event
    return facts | {"switch": event.switch if isinstance(event, VersionLoaded) else None}


def _life_lines(node: Node) -> list[str]:
    life = node.life
    lines = []
    if life.live_at_us is None:
        lines.append("  never live")
    else:
        words = f"  live {when(life.live_at_us)}, {seconds(life.live_at_us - node.published_at_us)} after publication"
        if life.live_until_us is not None:
            words += f", for {seconds(life.live_until_us - life.live_at_us)} until version {life.followed_by}"
        lines.append(words)
    lines += [f"  a switch to it failed: {reason}" for reason in life.failed]
    if life.retired_at_us is not None:
        lines.append(f"  retired {when(life.retired_at_us)} by the rule {life.retired_by}")
    return lines


def _step_lines(node: Node) -> list[str]:
    step = node.step
    if step is None:
        return [f"  the weights of version {node.parent} under a new number" if node.is_branch_start else "  no step"]
    again = f", {step.replayed} of them used again" if step.replayed else ""
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in step.metrics.items())
    batch = f"{step.trajectories} trajectories of {len(step.groups)} groups{again}"
    return [
        f"  step from version {step.version_in} on {batch}; ledger@{step.ledger_offset}",
        f"  batch digest {step.batch_digest[:16]}...",
        f"  configuration {step.config_digest[:16]}..., code {step.code_revision}",
        *([f"  {metrics}"] if metrics else []),
    ]


def _parent(node: Node) -> dict[str, Any]:
    return {
        "version": node.version, "depth": node.depth, "status": node.status, "is_branch_start": node.is_branch_start,
        "manifest_sha256": node.manifest_sha256,
        "batch_digest": None if node.step is None else node.step.batch_digest,
    }  # fmt: skip


def _line_words(parents: Sequence[Node]) -> str:
    """The line to the first version; stretches of consecutive numbers as their ends. A branch start stands alone."""
    stretches: list[list[Node]] = []
    for node in parents:
        before = stretches[-1][-1] if stretches else None
        if before is None or before.version != node.version + 1 or before.is_branch_start or node.is_branch_start:
            stretches.append([node])
        else:
            stretches[-1].append(node)
    words = []
    for stretch in stretches:
        first, last = _parent_words(stretch[0]), _parent_words(stretch[-1])
        words.append(f"{first} <- ... <- {last}" if len(stretch) > 2 else " <- ".join(map(_parent_words, stretch)))
    return " <- ".join(words)


def _parent_words(node: Node) -> str:
    return f"{node.version} (branch start)" if node.is_branch_start else str(node.version)


def _numbers(versions: Sequence[int]) -> str:
    return f"version{'s' * (len(versions) > 1)} {', '.join(map(str, versions))}"
