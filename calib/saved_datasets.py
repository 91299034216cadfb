"""Images of Hugging Face data sets: directories of datasets.save_to_disk, read by Arrow alone, or opened objects."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.files import escapes_directory
from ground.places import Place, Url, open_file, place_from_text
from ground.records import MOST_BYTES, record_from_bytes

from .image_arrays import ImageShape
from .sources import MOST_BYTES as MOST_PICTURE_BYTES
from .sources import Pictures, Transform
from .tables import (
    Part,
    TableRows,
    arrow,
    bytes_of_column,
    class_indices,
    image_column,
    label_columns,
    opened_by_arrow,
    parts_of_files,
    present,
    table_errors,
)

R = TypeVar("R")

ROWS_OF_A_GROUP = 64
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
KIND = "file of datasets.save_to_disk"


class _File(msgspec.Struct, frozen=True):
    filename: str


class _State(msgspec.Struct, frozen=True):
    files: list[_File] = msgspec.field(name="_data_files")


class _Splits(msgspec.Struct, frozen=True):
    splits: list[str]


def is_saved_dataset(names: Collection[str], *, where: Place) -> bool:
    """Return whether a folder with files of these names was written by datasets.save_to_disk.

    Raises BadInput for the folder of several splits.
    """
    if SPLITS in names:
        splits = _record(where / SPLITS, _Splits).splits
        each = ", ".join(str(where / split) for split in splits[:5])
        raise BadInput(f"{where}: holds the splits of a data set; give one of them, such as {each}")
    return STATE in names and INFO in names


def _record(place: Place, record: type[R]) -> R:
    with open_file(place) as file:
        return record_from_bytes(file.read(MOST_BYTES + 1), record, where=str(place), remedy="save the data set again")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRows(TableRows):
    """Images in the record batches of Arrow streams, each read at its offset, and their hashes if they are known."""

    schema: Any
    digests: tuple[bytes, ...]

    def hashes(self, positions: Sequence[int]) -> Sequence[bytes]:
        return [self.digests[each] for each in positions] if self.digests else TableRows.hashes(self, positions)

    def arrays(self, part: Part, column: str) -> Iterator[Any]:
        ipc = arrow(self.files[part.file]).ipc
        with table_errors(self.files[part.file], KIND), opened_by_arrow(self.files[part.file]) as file:
            file.seek(part.at)
            batch = ipc.read_record_batch(ipc.read_message(file), self.schema)
            yield _checked(batch.column(self.schema.get_field_index(column)))


def _checked(array: Any) -> Any:
    array.validate(full=True)  # Arrow trusts the offsets in a file otherwise
    return array


def _record_batches(place: Place) -> Iterator[tuple[int, Any]]:
    """Yield the offset of each record batch with the batch."""
    ipc = arrow(place).ipc
    with table_errors(place, KIND), opened_by_arrow(place) as file:
        reader = ipc.open_stream(file)
        at = file.tell()
        for batch in reader:
            yield at, batch
            at = file.tell()


def _schema_of(place: Place) -> Any:
    with table_errors(place, KIND), opened_by_arrow(place) as file:
        return arrow(place).ipc.open_stream(file).schema


def saved_dataset(place: Place, *, column: str | None, shape: ImageShape, transform: Transform) -> SavedRows:
    """Open a directory that datasets.save_to_disk wrote.

    Local files are mapped into memory. Files of a URL are read once, which identifies their images. Raises BadInput for
    damaged files and without a column of images, Missing without pyarrow.
    """
    files = [each.filename for each in _record(place / STATE, _State).files]
    if odd := next(filter(escapes_directory, files), None):
        raise BadInput(f"{place / STATE}: {odd[:150]!r} leads out of its directory; expected a file in it")
    if not files:
        raise BadInput(f"{place}: holds no rows, expected at least one image")
    schema = _schema_of(place / files[0])
    column = image_column(schema, column, where=place)
    batches, digests = list[list[tuple[int, int]]](), list[bytes]()
    for name in files:
        batches.append([])
        for at, batch in _record_batches(place / name):
            if not batch.schema.equals(schema):
                raise BadInput(f"{place / name}: has other columns than {files[0]}; save the data set again")
            batches[-1].append((at, batch.num_rows))
            if isinstance(place, Url):
                with table_errors(place / name, KIND):
                    values = bytes_of_column(_checked(batch.column(schema.get_field_index(column))))
                digests += [hashlib.sha256(value or b"").digest() for value in values]
    return SavedRows(
        files=tuple(place / name for name in files),
        names=tuple(files),
        parts=parts_of_files(batches),
        column=column,
        integers=label_columns(schema),
        schema=schema,
        digests=tuple(digests),
        shape=shape,
        transform=transform,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRows(Pictures):
    """Images in the rows of a datasets.Dataset, in its order; those that it names by path are read from there."""

    dataset: Any
    """The column of images alone, in the format `arrow`."""
    whole: Any
    integers: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, position: int) -> str:
        return f"row {position}"

    def where(self, position: int) -> str:
        return f"data set row {position}"

    def content(self, position: int) -> bytes:
        return present(_stored(self.dataset, position), self.where(position))

    @property
    def label_columns(self) -> Sequence[str]:
        return self.integers

    def labels(self, column: str) -> NDArray[np.int64]:
        return class_indices(self.whole.select_columns([column])[:].column(0), column, "data set")


def _stored(column: Any, position: int) -> bytes | None:
    """Return the bytes of a row of a data set's only column, or of the file that it names; None for neither."""
    value = column[position].column(0)[0].as_py()
    content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    if content is None and path:
        with open_file(place_from_text(path)) as file:
            content = file.read(MOST_PICTURE_BYTES + 1)
    return content


def write_parquet(dataset: Any, path: Path, most: int) -> None:
    """Write the images of the first `most` rows of a datasets.Dataset by their stored bytes, with columns of labels.

    An image whose file can't be read becomes a null, which counts as a bad row of the file. Raises BadInput as
    `dataset_source` does.
    """
    whole, schema = dataset.with_format("arrow"), dataset.features.arrow_schema
    column = image_column(schema, None, where="data set")
    images, labels = whole.select_columns([column]), list(label_columns(schema))
    pyarrow = arrow("images")
    from pyarrow.parquet import ParquetWriter

    kept = pyarrow.schema([(column, pyarrow.binary()), *(schema.field(name) for name in labels)])
    with ParquetWriter(path, kept) as file:
        for start in range(0, min(len(images), most), ROWS_OF_A_GROUP):
            rows = range(start, min(start + ROWS_OF_A_GROUP, len(images), most))
            contents = list[bytes | None]()
            for position in rows:
                try:
                    contents.append(_stored(images, position))
                except (OSError, BadInput):
                    contents.append(None)
            numbers = whole.select_columns(labels)[start : rows.stop].columns if labels else []
            file.write_table(pyarrow.table([pyarrow.array(contents, pyarrow.binary()), *numbers], schema=kept))


def dataset_source(dataset: Any, *, shape: ImageShape, transform: Transform) -> DatasetRows:
    """Return the images in a column of a datasets.Dataset, by their stored bytes, without decoding by `datasets`.

    Raises BadInput for other objects and without a column of images.
    """
    if isinstance(dataset, Mapping):
        raise BadInput(f"holds the splits of a data set; give one of them: {', '.join(map(str, dataset))[:200]}")
    whole = dataset.with_format("arrow")
    schema = dataset.features.arrow_schema
    column = image_column(schema, None, where="data set")
    return DatasetRows(
        dataset=whole.select_columns([column]),
        whole=whole,
        integers=label_columns(schema),
        shape=shape,
        transform=transform,
    )
