"""Versions as external LoggedModels of one MLflow run: found before they are made, a version never has two.

Outputs and parents (model inputs of the run) are written in batches; `flush` before a bookmark.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from infra.mirror_entries import PREFIX, TAG_CHARS, cut, model_name
from infra.mlflow_access import MlflowAccess

MODEL_TYPE = "driftlog-policy"
# A page of MLflow's search; also how many are looked up at once when a run is opened again.
PAGE = 100
_IDS_REMEMBERED = 20_000


class MlflowModels:
    """The models of one run."""

    def __init__(self, access: MlflowAccess, run: str, run_id: str, *, is_new: bool) -> None:
        self._access = access
        self._run = run
        self._run_id = run_id
        self._ids: OrderedDict[int, str] = OrderedDict()
        self._knows_all = True
        """what is not remembered does not exist"""
        self._outputs_known: set[str] = set()
        self._outputs: dict[str, int] = {}
        """model id -> version, not written yet"""
        self._inputs: set[str] = set()
        if not is_new:
            self._read()

    def log(self, version: int, parent: int | None, tags: Mapping[str, str]) -> str:
        """Make the version's model, or add tags to it; its id."""
        all_tags = {f"{PREFIX}{key}": cut(value, TAG_CHARS) for key, value in tags.items()}
        if parent is not None:
            all_tags[f"{PREFIX}parent"] = str(parent)
            parent_id = self.find(parent)
            if parent_id is not None:
                all_tags[f"{PREFIX}parent_model_id"] = parent_id
                self._inputs.add(parent_id)
        model_id = self.find(version)
        if model_id is None:
            return self._make(version, all_tags)
        self._access.client.set_logged_model_tags(model_id, all_tags)
        self._add_output(model_id, version)
        return model_id

    def find(self, version: int) -> str | None:
        """The version's model in this MLflow run; a run that replaces another has models of its own."""
        if version in self._ids:
            self._ids.move_to_end(version)
            return self._ids[version]
        if self._knows_all:
            return None
        found = self._search(f" AND tags.`{PREFIX}version` = '{version}'", max_results=1)
        if not found:
            return None
        self._remember(version, found[0].model_id)
        return self._ids[version]

    def flush(self) -> None:
        """Write which models the run made and which it went on from."""
        entities = self._access.mlflow.entities
        if self._outputs:
            made = [entities.LoggedModelOutput(model_id, step=step) for model_id, step in self._outputs.items()]
            self._access.client.log_outputs(self._run_id, made)
            self._outputs_known |= self._outputs.keys()
            self._outputs.clear()
        if self._inputs:
            used = [entities.LoggedModelInput(model_id) for model_id in sorted(self._inputs)]
            self._access.client.log_inputs(self._run_id, [], used)
            self._inputs.clear()

    def _make(self, version: int, tags: Mapping[str, str]) -> str:
        """An external model: its weights lie in the checkpoint store, MLflow only describes them."""
        client = self._access.client
        model = client.create_logged_model(
            self._access.experiment_id,
            name=model_name(self._run, version),
            source_run_id=self._run_id,
            tags={
                "mlflow.model.isExternal": "true",
                f"{PREFIX}run": self._run,
                f"{PREFIX}version": str(version),
                **tags,
            },
            model_type=MODEL_TYPE,
        )
        client.finalize_logged_model(model.model_id, "READY")
        self._remember(version, model.model_id)
        self._add_output(model.model_id, version)
        return self._ids[version]

    def _add_output(self, model_id: str, version: int) -> None:
        # MLflow refuses the whole batch when one of it is there already.
        if model_id not in self._outputs_known:
            self._outputs[model_id] = version

    def _read(self) -> None:
        """What a process before this one has made."""
        run = self._access.client.get_run(self._run_id)
        self._outputs_known = {output.model_id for output in run.outputs.model_outputs}
        token: str | None = None
        while True:
            page = self._search("", max_results=PAGE, page_token=token)
            for model in page:
                version = model.tags.get(f"{PREFIX}version", "")
                if version.isdecimal():
                    if model.status != "READY":  # a crash between the two calls
                        self._access.client.finalize_logged_model(model.model_id, "READY")
                    self._remember(int(version), model.model_id)
            token = page.token
            if not token or not self._knows_all:
                return

    def _search(self, condition: str, **options: Any) -> Any:
        return self._access.client.search_logged_models(
            [self._access.experiment_id], filter_string=f"source_run_id = '{self._run_id}'{condition}", **options
        )

    def _remember(self, version: int, model_id: str) -> None:
        self._ids[version] = model_id
        while len(self._ids) > _IDS_REMEMBERED:
            self._ids.popitem(last=False)
            self._knows_all = False
