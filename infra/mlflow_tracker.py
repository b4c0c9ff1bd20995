"""The ExperimentTracker on MLflow: one run with curves by version, one external LoggedModel a version.

Guarantees: every call may be repeated without a second run, model, point, dataset or registry version; non-finite
numbers and over-long values never reach MLflow; every failure leaves as TrackerUnavailable, a deleted experiment as
ConfigError.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from infra.logs import event
from infra.mirror_entries import (
    BOOKMARK_TAG,
    PARAM_CHARS,
    PREFIX,
    TAG_CHARS,
    cut,
    param_values,
    range_source,
    safe_name,
    same_param,
    segment_name,
)
from infra.mlflow_access import MlflowAccess, MlflowSettings
from infra.mlflow_models import MlflowModels
from infra.mlflow_registry import MlflowRegistry
from infra.ports import Clock
from infra.tracker_port import EndStatus, Promotions, RangeRead, RunOrigin
from schemas.errors import TrackerUnavailable

log = logging.getLogger(__name__)

RUN_TAG, LOG_TAG = f"{PREFIX}run", f"{PREFIX}log"
REPLACES_TAG, REPLACED_TAG, REBUILD_TAG = f"{PREFIX}replaces", f"{PREFIX}replaced_by", f"{PREFIX}rebuild_of"
# MLflow's own limits: a request above them is refused whole.
_METRICS_A_BATCH = 1_000
_PARAMS_A_BATCH = 100
# Newest server first; older ones refuse more than 500 or 250 characters.
_PARAM_CHARS = (PARAM_CHARS, 500, 250)
DIGEST_CHARS = 32
"""MLflow takes 36, and tells datasets apart by name and digest alone"""


class MlflowTracker:
    """One run of ours in one MLflow run. Not thread-safe: one call at a time."""

    def __init__(self, settings: MlflowSettings, clock: Clock) -> None:
        self._access = MlflowAccess(settings)
        self._clock = clock
        self._run_id = ""
        self._replaces = ""
        self._made_here = ""
        """the run that `start(replace=True)` made: a retry goes on with it"""
        self._models: MlflowModels | None = None
        self._registry: MlflowRegistry | None = None
        self._metrics: list[Any] = []
        self._datasets: dict[str, Any] = {}
        self._nonfinite_warned: set[str] = set()

    @property
    def run_id(self) -> str:
        """MLflow's id of the run; empty before `start`."""
        return self._run_id

    # ------------------------------------------------------------------ the port

    def start(self, origin: RunOrigin, params: Sequence[Mapping[str, str]], *, replace: bool = False) -> str | None:
        """Find the run by its tags or make it. A deleted run is replaced by a new one that names the old."""
        self._metrics.clear()
        self._datasets.clear()
        with self._access.talking("start"):
            self._access.open(create=True)
            found, is_new = self._open_run(origin, replace=replace)
            self._run_id = found.info.run_id
            if found.info.status != "RUNNING":
                self._access.client.update_run(self._run_id, status="RUNNING")
            self._models = MlflowModels(self._access, origin.run, self._run_id, is_new=is_new)
            self._registry = MlflowRegistry(self._access, origin.run, self._run_id)
            self._log_params(dict(found.data.params), params)
            bookmark: str | None = found.data.tags.get(BOOKMARK_TAG)
            return bookmark

    def log_step(self, step: int, metrics: Mapping[str, float], at_us: int) -> None:
        """Buffered points of the curves."""
        with self._access.talking("log_step"):
            self._buffer(step, metrics, at_us, model_id=None)

    def log_version(
        self, version: int, parent: int | None, tags: Mapping[str, str], metrics: Mapping[str, float], at_us: int
    ) -> None:
        """One LoggedModel a version, found by its tag before it is made."""
        with self._access.talking("log_version"):
            model_id = self._started().log(version, parent, tags)
            self._buffer(version, metrics, at_us, model_id=model_id)

    def log_range(self, name: str, read: RangeRead) -> None:
        """A buffered dataset input: its source names the records."""
        entities = self._access.mlflow.entities
        source = range_source(read)
        dataset = entities.Dataset(
            name=name,
            # With the run: MLflow keeps the first source of a digest, for every run of the experiment.
            digest=hashlib.sha256(f"{self._run_id} {source}".encode()).hexdigest()[:DIGEST_CHARS],
            source_type="kafka",
            source=source,
            profile=json.dumps({"records": read.records}),
        )
        self._datasets[name] = entities.DatasetInput(dataset, [entities.InputTag("mlflow.data.context", "training")])

    def log_text(self, path: str, text: str) -> None:
        """An artifact of the run."""
        with self._access.talking("log_text"):
            self._access.client.log_text(self._run_id, text, path)

    def promote(self, promotions: Promotions) -> None:
        """Registry versions and aliases."""
        models = self._started()
        with self._access.talking("promote"):
            tags = self._access.client.get_run(self._run_id).data.tags
            if REPLACED_TAG in tags:
                # A rebuild took this run's place while we wrote: the next start finds the new one.
                raise TrackerUnavailable(f"mlflow run {self._run_id} was replaced by {tags[REPLACED_TAG]}")
            assert self._registry is not None
            self._registry.bring_to(promotions, models)

    def save_bookmark(self, bookmark: str) -> None:
        """Write the buffer; the bookmark is in the last batch, and MLflow writes tags of a batch last."""
        if len(bookmark) > TAG_CHARS:
            raise ValueError(f"bookmark has {len(bookmark)} characters, at most {TAG_CHARS}")
        with self._access.talking("save_bookmark"):
            self._flush(bookmark)

    def take_place(self) -> None:
        """The run that was there before names this one from now on, and is left as it is."""
        with self._access.talking("take_place"):
            client = self._access.client
            if not self._made_here:
                return
            if self._replaces:
                client.set_tag(self._run_id, REPLACES_TAG, self._replaces)
                client.set_tag(self._replaces, REPLACED_TAG, self._run_id)
            # Last: until here every other process takes the old run.
            client.delete_tag(self._run_id, REBUILD_TAG)
            self._made_here = ""

    def end(self, status: EndStatus, at_us: int | None = None) -> None:
        """Close the MLflow run; curves can still be added later."""
        with self._access.talking("end"):
            self._flush(None)
            end_us = self._clock.now_us() if at_us is None else at_us
            self._access.client.set_terminated(self._run_id, status.upper(), end_time=end_us // 1_000)

    # ------------------------------------------------------------------ the run

    def _open_run(self, origin: RunOrigin, *, replace: bool) -> tuple[Any, bool]:
        """(the run of this log, whether it was made now). Of two made by accident every process takes the older."""
        runs = [run for run in self._access.find_runs(f"tags.`{RUN_TAG}` = '{origin.run}'") if _is_of(run, origin)]
        active = [run for run in runs if run.info.lifecycle_stage == "active" and not is_set_aside(run)]
        if replace:
            again = [run for run in runs if run.info.run_id == self._made_here and run.info.lifecycle_stage == "active"]
            if again:
                return again[0], False
            self._replaces = active[0].info.run_id if active else ""
            made = self._create_run(origin, {REBUILD_TAG: self._replaces or "nothing"})
            self._made_here = made.info.run_id
            return made, True
        if active:
            if LOG_TAG not in active[0].data.tags:
                self._access.client.set_tag(active[0].info.run_id, LOG_TAG, origin.log_id)
            return active[0], False
        tags = {}
        deleted = [run for run in runs if run.info.lifecycle_stage != "active"]
        if deleted:
            old = deleted[-1].info.run_id
            tags[REPLACES_TAG] = old
            event(log, "tracker_run_was_deleted", level=logging.WARNING, run=origin.run, old_run_id=old)
        return self._create_run(origin, tags), True

    def _create_run(self, origin: RunOrigin, tags: Mapping[str, str]) -> Any:
        return self._access.client.create_run(
            self._access.experiment_id,
            run_name=origin.run,
            start_time=origin.started_at_us // 1_000,
            tags={RUN_TAG: origin.run, LOG_TAG: origin.log_id, "mlflow.source.name": "driftlog", **tags},
        )

    def _started(self) -> MlflowModels:
        assert self._models is not None, "start comes first"
        return self._models

    # ------------------------------------------------------------------ params

    def _log_params(self, there: Mapping[str, str], settings: Sequence[Mapping[str, str]]) -> None:
        """Add what is new. MLflow cannot change a value: a changed one is added under `<key>/segment-<n>`."""
        fresh: dict[str, str] = {}
        for key, values in param_values(settings).items():
            known: list[str] = []
            while segment_name(key, len(known)) in there:
                known.append(there[segment_name(key, len(known))])
            if all(same_param(old, new) for old, new in zip(known, values, strict=False)):
                missing = values[len(known) :]
            else:  # another history than the one we know: what is in force must be the last
                missing = [] if same_param(known[-1], values[-1]) else values[-1:]
            fresh |= {segment_name(key, len(known) + index): value for index, value in enumerate(missing)}
        names = sorted(fresh)
        for begin in range(0, len(names), _PARAMS_A_BATCH):
            self._log_param_batch({name: fresh[name] for name in names[begin : begin + _PARAMS_A_BATCH]})

    def _log_param_batch(self, params: Mapping[str, str]) -> None:
        param = self._access.mlflow.entities.Param
        for limit in _PARAM_CHARS:
            entries = [param(name, cut(value, limit, _artifact_of(name))) for name, value in params.items()]
            try:
                self._access.client.log_batch(self._run_id, params=entries)
            except self._access.mlflow.MlflowException as error:
                too_long = error.error_code == "INVALID_PARAMETER_VALUE" and "length" in str(error).lower()
                if not too_long or limit == _PARAM_CHARS[-1]:
                    raise
                continue
            for name, value in params.items():
                if len(value) > limit:
                    self._access.client.log_text(self._run_id, value, _artifact_of(name))
            return

    # ------------------------------------------------------------------ curves

    def _buffer(self, step: int, metrics: Mapping[str, float], at_us: int, *, model_id: str | None) -> None:
        for key, value in metrics.items():
            if not math.isfinite(value):
                # MLflow would store infinity as 1.8e308 and scale every chart by it.
                if key not in self._nonfinite_warned:
                    self._nonfinite_warned.add(key)
                    event(
                        log,
                        "metric_not_finite",
                        level=logging.WARNING,
                        metric=key,
                        policy_version=step,
                        value=str(value),
                    )
                continue
            point = self._access.mlflow.entities.Metric(
                safe_name(key), float(value), at_us // 1_000, step, model_id=model_id, run_id=self._run_id
            )
            self._metrics.append(point)
        if len(self._metrics) >= _METRICS_A_BATCH:
            self._write_metrics(_METRICS_A_BATCH)

    def _flush(self, bookmark: str | None) -> None:
        client = self._access.client
        if self._models is not None:
            self._models.flush()
        if self._datasets:
            client.log_inputs(self._run_id, list(self._datasets.values()))
            self._datasets.clear()
        while len(self._metrics) > _METRICS_A_BATCH:
            self._write_metrics(_METRICS_A_BATCH)
        tags = [] if bookmark is None else [self._access.mlflow.entities.RunTag(BOOKMARK_TAG, bookmark)]
        if self._metrics or tags:
            client.log_batch(self._run_id, metrics=self._metrics, tags=tags)
            self._metrics.clear()

    def _write_metrics(self, count: int) -> None:
        self._access.client.log_batch(self._run_id, metrics=self._metrics[:count])
        del self._metrics[:count]


def _is_of(run: Any, origin: RunOrigin) -> bool:
    """It mirrors this log; a run without the tag was made before there was one."""
    log_id: str = run.data.tags.get(LOG_TAG, origin.log_id)
    return log_id == origin.log_id


def is_set_aside(run: Any) -> bool:
    """Replaced, or a rebuild that is not complete (yet, or for ever: its process died)."""
    return REPLACED_TAG in run.data.tags or REBUILD_TAG in run.data.tags


def _artifact_of(name: str) -> str:
    return f"params/{name.replace('/', '.').replace(':', '.').replace(' ', '_')[:120]}.txt"
