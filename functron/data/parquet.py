"""Parquet files of text: a column with a document in every row."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from functron.data.records import Text
from functron.errors import Problem, nearest, raise_problems

ROWS = 256
_CANNOT = "cannot read Parquet"


def row_groups(file: Path, key: str = "text") -> list[int]:
    """The rough sizes of a file's row groups, in bytes, from its footer alone.

    Raises:
        ValueError: the package pyarrow is missing, the file is damaged, or no column of text is
            called `key`.
    """
    metadata = _open(file, key).metadata
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def read_parquet(
    file: Path, key: str = "text", start: int = 0, stop: int | None = None
) -> Iterator[Text]:
    """The texts of row groups `start` to `stop`, some rows at a time; a text's place is its row.

    A row that has none (null: None or NaN in pandas) comes with its problem, and a damaged row
    group ends with one.

    Raises:
        ValueError: what `row_groups` raises.
    """
    import pyarrow

    opened = _open(file, key)
    counts = _counts(opened)
    last = len(counts) if stop is None else stop
    for group in range(start, last):
        row = sum(counts[:group])
        try:
            for batch in opened.iter_batches(ROWS, row_groups=[group], columns=[key]):
                yield from _texts(file, key, row, batch.column(0), counts)
                row += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            got = f"damaged data ({str(error).splitlines()[0]})"
            place = f"{file}, row group {group}, row {row - sum(counts[:group])} or after"
            problem = Problem(place, got, "rows of text", "copy or download the file again")
            yield Text("", row, problem)


def where(file: Path, place: int) -> str:
    """``FILE, row group G, row R``, both from 0, of a row of the file."""
    import pyarrow.parquet

    return _where(file, place, _counts(pyarrow.parquet.ParquetFile(file)))


def _counts(opened: Any) -> list[int]:
    metadata = opened.metadata
    return [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]


def _where(file: Path, place: int, counts: list[int]) -> str:
    for group, count in enumerate(counts):
        if place < count:
            return f"{file}, row group {group}, row {place}"
        place -= count
    raise AssertionError("unreachable")


def _texts(file: Path, key: str, row: int, column: Any, counts: list[int]) -> Iterator[Text]:
    try:
        values = column.to_pylist()
    except UnicodeDecodeError as error:
        got = f"byte {error.object[error.start]:#04x} in column {key!r}"
        place = f"{_where(file, row, counts)} or one of the {len(column) - 1} after it"
        yield Text("", row, Problem(place, got, "UTF-8"))
        return
    for place, text in enumerate(values, row):
        if text is None:
            fix = "leave such rows out when writing the file"
            got = f"null (None or NaN) in column {key!r}"
            yield Text("", place, Problem(_where(file, place, counts), got, "text", fix))
        else:
            yield Text(text, place)


def _open(file: Path, key: str) -> Any:
    if find_spec("pyarrow") is None:
        fix = "pip install pyarrow, or functron[parquet]"
        problem = Problem("pyarrow", "no such package", f"it, to read {file}", fix)
        raise_problems(_CANNOT, [problem])
    import pyarrow
    import pyarrow.parquet

    try:
        opened = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        got = str(error).splitlines()[0]
        fix = "copy or download it again"
        raise_problems(_CANNOT, [Problem(str(file), got, "a Parquet file", fix)])
        raise AssertionError("unreachable") from error
    schema = opened.schema_arrow
    if key not in schema.names:
        got = f"no column {key!r}"
        fix = f"--key: {nearest(key, schema.names)}"
        raise_problems(_CANNOT, [Problem(str(file), got, "a column of text", fix)])
    kind = schema.field(key).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    types = pyarrow.types
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        fix = "write it as text; a column that is NaN in every row becomes one of numbers"
        problem = Problem(f"{file}, column {key!r}", str(kind), "strings", fix)
        raise_problems(_CANNOT, [problem])
    return opened
