"""The mirror of a run in a form that can be compared: one line an entry, `place -> value`, both as text.

Both sides build it with these functions: what the log says (consumers/offline/mirror) and what is read back from
MLflow (infra/mlflow_reading). No ids of MLflow and no stamps of its own clock are in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from infra.tracker_port import RangeRead

Mirror = Mapping[str, str]
"""place of an entry -> its value"""

PREFIX = "driftlog."
BOOKMARK_TAG = f"{PREFIX}bookmark"
# About the place in MLflow, not about the run.
PLACE_TAGS = frozenset({BOOKMARK_TAG, f"{PREFIX}replaces", f"{PREFIX}replaced_by", f"{PREFIX}rebuild_of"})
ALIASES = ("live", "best")
TAG_CHARS = 5_000
PARAM_CHARS = 6_000
_BAD_NAME_CHARS = re.compile(r"[^A-Za-z0-9_\-. /:]")
_CUT = "...[cut, "


def safe_name(text: str) -> str:
    """A metric or parameter name that MLflow accepts."""
    return _BAD_NAME_CHARS.sub("_", text)[:250] or "_"


def cut(text: str, limit: int, whole_in: str = "") -> str:
    """At most `limit` characters; a cut one says so, and where the rest is."""
    if len(text) <= limit:
        return text
    mark = f"{_CUT}{len(text)} characters{f', whole in {whole_in}' if whole_in else ''}]"
    return text[: max(0, limit - len(mark))] + mark


def same_param(there: str, value: str) -> bool:
    """The value there is this one, or this one cut."""
    if there == value:
        return True
    head, mark, rest = there.partition(_CUT)
    return bool(mark) and rest.startswith(f"{len(value)} characters") and value.startswith(head)


def segment_name(key: str, segment: int) -> str:
    """MLflow cannot change a parameter: the n-th change of it is another one."""
    return key if segment == 0 else f"{key}/segment-{segment}"


def param_values(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Per parameter its values in order, without repeats in a row.

    >>> param_values([{"lr": "1e-3"}, {"lr": "1e-3"}, {"lr": "1e-4"}])
    {'lr': ['1e-3', '1e-4']}
    """
    values: dict[str, list[str]] = {}
    for segment in settings:
        for key, value in segment.items():
            known = values.setdefault(safe_name(key), [])
            if not known or known[-1] != value:
                known.append(value)
    return values


def model_name(run: str, version: int) -> str:
    """Name of a version's LoggedModel."""
    return f"{run}-v{version}"


def registry_name(experiment: str, run: str) -> str:
    """Name of the run's registered model. The registry is one for all experiments: the name says both.

    >>> registry_name("team/a", "demo")
    'team_a.demo'
    """
    return safe_name(f"{experiment}.{run}").replace("/", "_").replace(":", "_")


def registry_source(manifest_uri: str) -> str:
    """A registry version's source. A scheme of our own: MLflow takes no local path from a server's client, and
    nothing is to be fetched through it."""
    return f"driftlog:/{manifest_uri}"


def range_source(read: RangeRead) -> str:
    """A dataset's source: which records of which topic."""
    content: dict[str, object] = {
        "topic": read.topic,
        "partitions": {str(number): list(ends) for number, ends in sorted(read.partitions.items())},
    }
    if read.carried:
        content["carried"] = {str(number): list(offsets) for number, offsets in sorted(read.carried.items())}
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


# ---------------------------------------------------------------------- places


def run_tag(key: str) -> str:
    """A tag of the run, without the prefix."""
    return f"run/tag/{key.removeprefix(PREFIX)}"


def param(name: str) -> str:
    """A parameter of the run."""
    return f"param/{name}"


def point(metric: str, step: int, at_ms: int, value: float) -> str:
    """A point of a curve. All of it is the place: a changed one is a missing and a foreign one."""
    return f"curve/{metric}@{step} at {at_ms} = {value!r}"


def version_name(version: object) -> str:
    """The version's entry itself; its value is the name."""
    return f"version/{version}"


def version_tag(version: object, key: str) -> str:
    """A tag of a version, without the prefix."""
    return f"version/{version}/tag/{key.removeprefix(PREFIX)}"


def version_point(version: object, metric: str, step: int, at_ms: int, value: float) -> str:
    """A metric shown at the version."""
    return f"version/{version}/metric/{metric}@{step} at {at_ms} = {value!r}"
