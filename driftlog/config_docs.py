"""docs/configuration.md, made from the configuration models: every key with unit, default and its one line.

python -m driftlog.config_docs > docs/configuration.md
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import typing
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from infra.config import OPERATIONAL_KEYS, OPERATIONAL_SECTIONS, Config
from infra.config_section import Section

_HEAD = """\
# Configuration

Made from `infra/config.py` by `python -m driftlog.config_docs > docs/configuration.md`; a test keeps it up to date.

One TOML file a run; an unknown key is an error that names the nearest one. `--set section.key=value` changes a
single setting. The resolved configuration is stored with the run as `config.json`.

Settings marked `*` may change when a run is resumed or extended. Every other one decides what is learnt: a run
refuses to go on when it changed, unless `--accept-changes` is given (then the new configuration is stored
beside the old one, as `config.N.json`).

The environment is read for addresses and credentials only: `DRIFTLOG_KAFKA` (over `kafka.bootstrap_servers`),
`MLFLOW_TRACKING_URI` (over `mlflow.uri`), and `DRIFTLOG_KAFKA_<KEY>` or `DRIFTLOG_KAFKA_<KEY>_FILE` for each key of
`kafka.security` ([docker compose](compose.md) lists them).
"""


def configuration_markdown() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, Section)
        rows = _rows(name, section)
        parts.append(f"\n## [{name}]\n\n| key | default | values | meaning |\n|---|---|---|---|\n" + "".join(rows))
    return "".join(parts)


def _rows(name: str, section: type[Section]) -> Iterator[str]:
    comments = _field_comments(section)
    for key, field in section.model_fields.items():
        free = name in OPERATIONAL_SECTIONS or f"{name}.{key}" in OPERATIONAL_KEYS
        cells = (f"`{key}`{' *' if free else ''}", _default(field), _values(field), comments.get(key, ""))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "unset" if value is None else f"`{json.dumps(value)}`"


def _values(field: FieldInfo) -> str:
    bounds = [_bound(constraint) for constraint in field.metadata]
    return ", ".join([_type_words(field.annotation), *(bound for bound in bounds if bound)])


def _bound(constraint: object) -> str:
    for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        limit = getattr(constraint, attribute, None)
        if limit is not None:
            return f"{sign} {limit:g}"
    return ""


def _type_words(annotation: object) -> str:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if typing.get_origin(annotation) is tuple:
        return f"{len(arguments)} numbers"
    if arguments and typing.get_origin(annotation) is dict:
        return "table"
    if arguments and typing.get_origin(annotation) is list:
        return "list of tables" if inspect.isclass(arguments[0]) and issubclass(arguments[0], Section) else "list"
    if arguments:  # a union; None shows as the default `unset`
        return " or ".join(_type_words(part) for part in arguments if part is not type(None))
    words = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return words.get(annotation, str(annotation)) if isinstance(annotation, type) else str(annotation)


def _field_comments(section: type[Section]) -> dict[str, str]:
    """field -> the string under it."""
    tree = ast.parse(inspect.getsource(section))
    assert isinstance(tree.body[0], ast.ClassDef)
    return dict(_comments(tree.body[0]))


def _comments(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            yield statement.target.id, " ".join(following.value.value.split())


if __name__ == "__main__":
    sys.stdout.write(configuration_markdown())
