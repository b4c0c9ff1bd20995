"""Rows of a prompts file: JSON lines, Parquet, or the folder of a Hugging Face dataset split; and its digest.

Guarantees: the order of the rows depends only on the bytes and names of the files; an error names file, row and what
to do. Knows nothing of models: infra/prompt_rows.py makes prompts of rows. Files are read row group by row group.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

JSON_LINES = (".jsonl", ".ndjson", ".json")
SHARDS = (".parquet", ".arrow")
_SHARD_NAME = re.compile(r"(?P<split>.+?)-\d{5}-of-\d{5}(-[0-9a-f]+)?$")
_CHUNK_BYTES = 1 << 20
_BATCH_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row as it stands in a file."""

    where: str
    """file and line (from 1) or row (from 0), for messages"""
    values: Mapping[str, Any]


def prompts_sha256(path: Path) -> str:
    """sha256 hex over the bytes of the file, or of all shards in their order, each with its length."""
    digest = hashlib.sha256()
    for file in prompt_files(path):
        digest.update(f"{file.suffix}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def prompt_rows(path: Path) -> Iterator[Row]:
    """Every row, in order. ConfigError names what cannot be read."""
    empty = True
    for file in prompt_files(path):
        for row in _json_lines(file) if file.suffix in JSON_LINES else _table_rows(file):
            empty = False
            yield row
    if empty:
        raise ConfigError(f"{path} holds no prompt: it is empty")


def prompt_files(path: Path) -> list[Path]:
    """The files a path stands for, in the order they are read."""
    if path.is_dir():
        return _shards(path)
    if not path.is_file():
        raise ConfigError(f"task.prompts: no file or folder {path}")
    if path.suffix not in (*JSON_LINES, *SHARDS):
        raise ConfigError(f"{path}: prompts are read from {', '.join((*JSON_LINES, *SHARDS))} or a dataset folder")
    return [path]


# ---------------------------------------------------------------------- one file


def _json_lines(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield Row(where=f"{path}:{number}", values=_object(line, f"{path}:{number}"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: broken line, not JSON ({error}): repair or remove it") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ConfigError(f"{where}: a line holds one JSON object with named columns, this one a {kind}")
    return value


def _table_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa

    number = 0
    try:
        for batch in _batches(path):
            for values in batch.to_pylist():
                yield Row(where=f"{path}, row {number}", values=values)
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read after row {number}: {error}: is it whole?") from error


def _batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_BATCH_ROWS)
        return
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            whole = pa.ipc.open_file(source)  # the other of Arrow's two containers
            yield from (whole.get_batch(number) for number in range(whole.num_record_batches))
            return
        yield from reader


# ---------------------------------------------------------------------- a folder


def _shards(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        raise ConfigError(f"{folder} holds several splits: name one of its folders ({_names(_folders(folder))})")
    if (folder / "state.json").is_file():
        return _saved(folder)
    there = [path for path in [*folder.iterdir(), *_inside(folder / "data")] if path.suffix in SHARDS]
    shards = sorted(path for path in there if not path.name.startswith(("cache-", "indices-", ".")))
    if not shards:
        raise ConfigError(
            f"{folder} holds no {' or '.join(SHARDS)} file: name a .jsonl or .parquet file, or the folder of a split "
            f"(folders there: {_names(_folders(folder))})"
        )
    splits = {match["split"] for path in shards if (match := _SHARD_NAME.fullmatch(path.stem))}
    if len(splits) > 1:
        raise ConfigError(f"{folder} holds several splits ({', '.join(sorted(splits))}): put one into a folder")
    if len({path.suffix for path in shards}) > 1:
        raise ConfigError(f"{folder} holds .parquet and .arrow files: keep one kind, the other may be its copy")
    return shards


def _saved(folder: Path) -> list[Path]:
    """The files of a dataset that was saved with `save_to_disk`, as its state.json lists them."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        names = [str(entry["filename"]) for entry in state["_data_files"]]
        indices = state.get("_indices_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / 'state.json'} lists no _data_files: save the dataset again ({error})") from error
    if indices:
        raise ConfigError(f"{folder} selects rows by an index file: call flatten_indices() and save it again")
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder / 'state.json'} names {missing[0]!r}, which is not a file of that folder")
    return [folder / name for name in names]


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _names(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths) or "none"
