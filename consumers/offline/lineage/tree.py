"""A run's versions drawn: one line each, branches indented under where they began; or as a graph for graphviz. Pure."""

from __future__ import annotations

import json
from typing import Any

from consumers.offline.lineage import Lineage, Node
from consumers.offline.trace.words import when
from schemas.policy_state import VersionStatus

_INDENT = "  |"
_COLOURS = {
    VersionStatus.LIVE.value: "palegreen",
    VersionStatus.FAILED.value: "lightpink",
    VersionStatus.RETIRED.value: "lightgrey",
}


def tree_order(lineage: Lineage) -> list[tuple[int, int]]:
    """(version, indent) in the order to show them.

    The line to the newest version is not indented; what leaves it comes right behind the version where it left."""
    children = lineage.children()
    last: dict[int, int] = {}
    for version in sorted(children, reverse=True):
        last[version] = max([version, *(last[child] for child in children[version])])
    order: list[tuple[int, int]] = []
    waiting = [(0, 0)] if 0 in children else []
    while waiting:
        version, indent = waiting.pop()
        order.append((version, indent))
        ahead = sorted(children[version], key=lambda child: last[child])
        if ahead:
            waiting.append((ahead[-1], indent))
        waiting += [(child, indent + 1) for child in reversed(ahead[:-1])]
    return order


def tree_lines(lineage: Lineage) -> list[str]:
    """For a person."""
    head = f"run {lineage.run}: {len(lineage.nodes)} versions, newest {lineage.newest}, live {lineage.live}"
    return [head, *(f"{_INDENT * indent}{_words(lineage.nodes[v])}" for v, indent in tree_order(lineage))]


def tree_json(lineage: Lineage) -> str:
    """One JSON object."""
    versions = [_short(lineage.nodes[version], indent) for version, indent in tree_order(lineage)]
    content = {"run": lineage.run, "newest": lineage.newest, "live": lineage.live, "versions": versions}
    return json.dumps(content, indent=2)


def tree_dot(lineage: Lineage) -> str:
    """A graph in graphviz's language: from each version to those made from it; dashed where no step was made."""
    lines = [f"digraph {json.dumps(lineage.run)} {{", "  rankdir=LR; node [shape=box, style=filled, fillcolor=white];"]
    for version, node in sorted(lineage.nodes.items()):
        reward = _reward(node)
        label = f"{version}\\n{node.status}" + (f"\\nreward {reward:.3g}" if reward is not None else "")
        colour = _COLOURS.get(node.status, "white")
        pinned = ", peripheries=2" if node.is_pinned else ""
        lines.append(f'  {version} [label="{label}", fillcolor={colour}{pinned}];')
    for version, node in sorted(lineage.nodes.items()):
        if node.parent is not None:
            trajectories = 0 if node.step is None else node.step.trajectories
            style = "style=dashed" if node.is_branch_start else f'label="{trajectories}"'
            lines.append(f"  {node.parent} -> {version} [{style}];")
    return "\n".join([*lines, "}"])


def _words(node: Node) -> str:
    made = ["first" if node.parent is None else f"<- {node.parent}", f"depth {node.depth}", node.status]
    if node.is_pinned:
        made.append("pinned")
    if not node.has_state:
        made.append("no state")
    if node.is_branch_start:
        made.append("branch start")
    elif node.step is not None:
        lag = node.step.metrics.get("policy_lag/max")
        reward = _reward(node)
        made.append(f"{len(node.step.groups)} groups, {node.step.trajectories} trajectories")
        made += [] if reward is None else [f"reward {reward:.3g}"]
        made += [] if lag is None else [f"lag up to {lag:g}"]
    made.append(f"published {when(node.published_at_us)}")
    if node.life.live_at_us is not None:
        made.append(f"live after {(node.life.live_at_us - node.published_at_us) / 1e6:.1f} s")
    return f"{node.version:>4}  " + ", ".join(made)


def _short(node: Node, indent: int) -> dict[str, Any]:
    return {
        "version": node.version, "parent": node.parent, "depth": node.depth, "indent": indent,
        "is_branch_start": node.is_branch_start, "status": node.status, "is_pinned": node.is_pinned,
        "published_at_us": node.published_at_us, "live_at_us": node.life.live_at_us,
        "retired_at_us": node.life.retired_at_us, "manifest_sha256": node.manifest_sha256,
        "trajectories": 0 if node.step is None else node.step.trajectories,
        "metrics": {} if node.step is None else dict(node.step.metrics),
    }  # fmt: skip


def _reward(node: Node) -> float | None:
    return None if node.step is None else node.step.metrics.get("critic/rewards/mean")
