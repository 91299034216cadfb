"""Images in a column of parquet files. Row groups are read forward, page by page, and never as a whole."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ground.errors import BadInput
from ground.places import Place, Url, places_from_pattern

from .image_arrays import ImageShape
from .sources import Transform
from .tables import Part, TableRows, arrow, image_column, label_columns, opened_by_arrow, parts_of_files, table_errors

SUFFIX = ".parquet"
ROWS_AT_ONCE = 16
READ_BYTES = 2**20


@contextmanager
def _opened(place: Place, footer: Any = None) -> Iterator[Any]:
    arrow(place)
    from pyarrow import parquet

    with table_errors(place, "parquet file"), opened_by_arrow(place) as file:
        buffered = READ_BYTES if isinstance(place, Url) else 0  # a mapped file is read where it is
        yield parquet.ParquetFile(file, metadata=footer, buffer_size=buffered, pre_buffer=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetRows(TableRows):
    """Images in the rows of parquet files, whose `footers` were read at opening."""

    footers: tuple[Any, ...]

    def arrays(self, part: Part, column: str) -> Iterator[Any]:
        with _opened(self.files[part.file], self.footers[part.file]) as file:
            chosen = {"row_groups": [part.at], "columns": [column], "use_threads": False}
            for batch in file.iter_batches(ROWS_AT_ONCE, **chosen):
                yield batch.column(0)


def parquet_from_pattern(pattern: Place, **options: Any) -> ParquetRows:
    """Open `x.parquet` or `x-{000..099}.parquet`, as open_parquet does."""
    files = places_from_pattern(pattern)
    return open_parquet(files, [each.name for each in files], **options)


def open_parquet(
    files: Sequence[Place], names: Sequence[str], *, column: str | None, shape: ImageShape, transform: Transform
) -> ParquetRows:
    """Open parquet files, reading only their footers.

    `column` is the one of the images, None to find it. Raises BadInput for a damaged file and for one without such a
    column, Missing without pyarrow.
    """
    footers, labels = list[Any](), list[str]()
    for place in files:
        with _opened(place) as file:
            footer, schema = file.metadata, file.schema_arrow
        column = image_column(schema, column, where=place)
        labels = [name for name in label_columns(schema) if not footers or name in labels]
        footers.append(footer)
    parts = parts_of_files(
        [(group, footer.row_group(group).num_rows) for group in range(footer.num_row_groups)] for footer in footers
    )
    if not any(part.rows for part in parts):
        raise BadInput(f"{files[0] if files else 'parquet'}: holds no rows, expected at least one image")
    return ParquetRows(
        files=tuple(files),
        names=tuple(names),
        parts=parts,
        column=column or "",
        integers=tuple(labels),
        footers=tuple(footers),
        shape=shape,
        transform=transform,
    )
