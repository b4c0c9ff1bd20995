"""Ways to damage a stored message: its bytes, its Arrow columns, its JSON values, its headers. All from one seed."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pyarrow as pa

from schemas.headers import ARROW_SCHEMA, PAYLOAD_BYTES, ROW_COUNT

Headers = tuple[tuple[str, bytes], ...]
_INTERESTING = (
    0,
    1,
    -1,
    2,
    7,
    127,
    128,
    255,
    256,
    2**15,
    2**16,
    2**31 - 1,
    -(2**31),
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
)
_ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf, "", "x", "\x00", "\ud800",
    "9" * 5000, [], {}, [[]], [None], {"": None}, ["a"] * 300,
)  # fmt: skip


def damaged_bytes(rng: random.Random, value: bytes, others: Sequence[bytes]) -> bytes:
    """One to four byte-level edits."""
    data = bytearray(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data)) if data else 0
        end = min(len(data), at + rng.choice((1, 2, 4, 8, 16, 64)))
        how = rng.randrange(8)
        if how == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1 and data:
            data[at] = rng.randrange(256)
        elif how == 2:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 32)))
        elif how == 3:
            del data[at:end]
        elif how == 4:
            data[at:at] = data[at:end]
        elif how == 5:
            del data[at:]
        elif how == 6:
            other = rng.choice(others)
            start = rng.randrange(len(other)) if other else 0
            data[at:end] = other[start : start + rng.choice((4, 16, 128))]
        else:
            # Lengths and offsets of Arrow are aligned integers: those are worth more than random bytes.
            width = rng.choice((4, 8))
            at -= at % width
            data[at : at + width] = struct.pack("<q", max(-(2**63), rng.choice(_INTERESTING)))[:width]
    return bytes(data)


def damaged_table(rng: random.Random, value: bytes) -> tuple[bytes, int]:
    """The same Arrow stream with other columns or cells, encoded anew: (value, rows)."""
    with pa.ipc.open_stream(value) as reader:
        batch = reader.read_next_batch()
    rows = batch.to_pylist()
    schema = batch.schema
    for _ in range(rng.choice((1, 1, 2, 3))):
        how = rng.randrange(6)
        name = rng.choice(schema.names) if schema.names else ""
        if how == 0 and rows:
            row = rng.choice(rows)
            row[name] = odd_like(rng, row.get(name))
        elif how == 1 and rows:
            rows.insert(rng.randrange(len(rows) + 1), dict(rng.choice(rows)))
        elif how == 2 and len(rows) > 1:
            del rows[rng.randrange(len(rows))]
        elif how == 3 and len(schema) > 1:
            schema = schema.remove(schema.get_field_index(name))
        elif how == 4:
            schema = schema.append(pa.field(f"added{rng.randrange(9)}", rng.choice((pa.int64(), pa.utf8()))))
        elif name:
            place = schema.get_field_index(name)
            schema = schema.set(
                place, pa.field(name, rng.choice((pa.utf8(), pa.int8(), pa.float64(), pa.list_(pa.int64()))))
            )
    try:
        changed = pa.RecordBatch.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema)
    except (pa.ArrowException, OverflowError, ValueError, TypeError, UnicodeError):
        return value, batch.num_rows
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for _ in range(rng.choice((1, 1, 1, 1, 2, 0))):
            writer.write_batch(changed)
    return sink.getvalue().to_pybytes(), changed.num_rows


def odd_like(rng: random.Random, value: Any) -> Any:
    """Another value of the same kind, as far as there is a kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -1, 0, 2**31 - 1, -(2**31), 2**62))
    if isinstance(value, float):
        return rng.choice((math.nan, math.inf, -math.inf, 1e-5, 1.0, -1e300, 0.0, None))
    if isinstance(value, str):
        return rng.choice(("", "x", value + "/", value[:-1], value.upper(), "demo/p1/e0/a0", None))
    if isinstance(value, list) and value:
        changed = list(value)
        place = rng.randrange(len(changed))
        if isinstance(changed[place], tuple):  # of a map: Arrow itself dies of a null among its entries
            key, held = changed[place]
            changed[place] = (key, odd_like(rng, held))
            return changed
        how = rng.randrange(4)
        if how == 0:
            changed[place] = odd_like(rng, changed[place])
        elif how == 1:
            del changed[place]
        elif how == 2:
            changed.append(changed[place])
        else:
            changed[place] = None
        return changed
    if isinstance(value, dict) and value:
        changed = dict(value)
        key = rng.choice(list(changed))
        changed[key] = odd_like(rng, changed[key])
        return changed
    return rng.choice((None, [], 0))


def damaged_json(rng: random.Random, value: bytes) -> bytes:
    """The same document with some values, keys or types changed."""
    document = json.loads(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        node: Any = document
        while isinstance(node, (dict, list)) and node and rng.random() < 0.6:
            inner = rng.choice(list(node.values()) if isinstance(node, dict) else node)
            if not isinstance(inner, (dict, list)):
                break
            node = inner
        if isinstance(node, dict):
            key = rng.choice([*node, "added", ""])
            if rng.random() < 0.25:
                node.pop(key, None)
            else:
                node[key] = rng.choice((odd_like(rng, node.get(key)), deepcopy(rng.choice(_ODD_VALUES))))
        elif isinstance(node, list):
            node.append(deepcopy(rng.choice(_ODD_VALUES)))
    text = json.dumps(document)
    if rng.random() < 0.05:
        text = text[:-1] + rng.choice(("", "]", ',"x":' + "[" * 2000 + "]" * 2000 + "}", "}}"))
    return text.encode(errors="surrogatepass")


def damaged_headers(rng: random.Random, headers: Headers, value: bytes, rows: int | None) -> Headers:
    """Headers that fit the value (so that it is looked at), or, now and then, ones that do not."""
    found = dict(headers)
    if PAYLOAD_BYTES in found:
        found[PAYLOAD_BYTES] = str(len(value)).encode()
        if rows is not None:
            found[ROW_COUNT] = str(rows).encode()
    if found and rng.random() < 0.1:
        name = rng.choice([*found, ARROW_SCHEMA])
        how = rng.randrange(3)
        if how == 0:
            found.pop(name, None)
        elif how == 1:
            found[name] = rng.choice(
                (b"", b"\xff\xfe", b"0", b"-1", b"99999999999999999999", b"trajectories/2.0", b"x/y/z")
            )
        else:
            return (*found.items(), (name, rng.randbytes(4)))
    return tuple(found.items())
