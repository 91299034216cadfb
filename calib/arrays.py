"""Arrays of a file as a model's inputs: one for each of its ports, by their names, as the model takes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from ground.arrays import array_from_npy, arrays_from_npz
from ground.errors import BadInput
from ground.feeds import Feeds, checked_feeds, feeds_of_ports, shape_text
from ground.files import regular_file
from ground.ports import Port

from .rows import Rows

SUFFIXES = (".npz", ".safetensors", ".npy")
_ROWS = 1024  # looked at at once where values are checked


def open_arrays(
    path: Path, ports: Sequence[Port], *, id_counts: Mapping[str, int], samples: int | None = None, seed: int = 0
) -> Rows:
    """An array [N, *shape] for each port, under its name in .npz or .safetensors; of a model with one port a .npy too,
    memory-mapped. `id_counts`: of ports of ids how many there are. `samples` of the rows are drawn by `seed`.

    Raises BadInput for a file that is missing or damaged, for an array that is missing, of no port or of another type
    or shape than its port's, for NaN and Inf, and for ids that the model doesn't know.
    """
    arrays = checked_feeds(feeds_of_ports(_arrays(path, ports), ports), ports, where=str(path))
    for name, array in arrays.items():
        _refuse_values(array, id_counts.get(name), where=f"{path}: {name}")
    return Rows.sampled(arrays, where=str(path), samples=samples, seed=seed)


def _arrays(path: Path, ports: Sequence[Port]) -> Feeds:
    ports_text = ", ".join(f"{port.name} {shape_text(port)} {port.dtype}" for port in ports).replace("[B", "[N")
    expected = f"expected {' or '.join(SUFFIXES)} with {ports_text}"
    if not path.is_file() or path.suffix not in SUFFIXES:
        raise BadInput(f"{path}: {'not such a file' if path.exists() else 'no such file'}, {expected}")
    if path.suffix == ".npz":
        return arrays_from_npz(path)
    if path.suffix == ".safetensors":
        return _from_safetensors(path)
    if len(ports) > 1:
        raise BadInput(f"{path}: one array, {expected}")
    return {ports[0].name: array_from_npy(path, mapped=True)}


def _from_safetensors(path: Path) -> Feeds:
    try:
        with safe_open(regular_file(path), framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # safetensors raises its own, and numpy its own at types that it has not
        raise BadInput(
            f"{path}: not a valid .safetensors file of numpy types ({type(error).__name__}: {error!s:.200})"
        ) from error


def _refuse_values(array: NDArray[Any], id_count: int | None, *, where: str) -> None:
    for part in (array[start : start + _ROWS] for start in range(0, len(array), _ROWS)):
        if array.dtype.kind == "f" and not np.isfinite(part).all():
            raise BadInput(f"{where}: holds NaN or Inf, expected finite values")
        if id_count is not None and (part.min() < 0 or part.max() >= id_count):
            raise BadInput(
                f"{where}: numbers from {part.min()} to {part.max()}, expected 0 to {id_count - 1}: rows of the table "
                "that the model looks them up in"
            )
