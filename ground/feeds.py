"""Named input and output arrays of models, with the batch as first dimension, checked against ports."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BadInput
from .pixels import PIXEL
from .ports import Port

Feeds = Mapping[str, NDArray[Any]]
Outputs = Mapping[str, NDArray[Any]]


def batch_size(arrays: Feeds | Outputs) -> int:
    return len(next(iter(arrays.values())))


def select_rows(arrays: Feeds | Outputs, rows: slice | NDArray[np.integer]) -> dict[str, NDArray[Any]]:
    return {name: array[rows] for name, array in arrays.items()}


def iter_batches(arrays: Feeds | Outputs, size: int) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the rows in batches of `size`; the last may be smaller."""
    for start in range(0, batch_size(arrays), size):
        yield select_rows(arrays, slice(start, start + size))


def fill_batch(feeds: Feeds, batch: int) -> dict[str, NDArray[Any]]:
    """Return the first `batch` inputs, starting again from the first if there are fewer."""
    if batch < 1:
        raise BadInput(f"a batch size is at least 1, got {batch}")
    return select_rows(feeds, np.arange(batch) % batch_size(feeds))


def single_array(arrays: Feeds | Outputs) -> NDArray[Any]:
    """Return the only array of a mapping. Raises BadInput for several."""
    if len(arrays) != 1:
        raise BadInput(f"expected one array, got {len(arrays)}: {', '.join(arrays)}; say which one is meant")
    return next(iter(arrays.values()))


def feeds_from_array(array: NDArray[Any], ports: Sequence[Port]) -> Feeds:
    """Return an array under the name of a model's only input. Raises BadInput for several inputs."""
    if len(ports) != 1:
        raise BadInput(f"one array for {len(ports)} inputs; expected one for each of {', '.join(_port_names(ports))}")
    return {ports[0].name: array}


def feeds_of_ports(feeds: Feeds, ports: Sequence[Port]) -> Feeds:
    """Return the feeds, with a single array renamed to a single port; several arrays or ports stay unchanged."""
    return feeds_from_array(single_array(feeds), ports) if len(feeds) == len(ports) == 1 else feeds


def random_feeds(ports: Sequence[Port], count: int, *, seed: int) -> Feeds:
    """Return `count` inputs for measurements that don't depend on values.

    They are normal noise for float32, uniform for pixels, and ones for other types: a token that every vocabulary has,
    or a mask that hides nothing. Raises BadInput for a free size.
    """
    free = [f"{port.name} {shape_text(port)}" for port in ports if min(port.shape, default=1) < 0]
    if free:
        raise BadInput(f"{', '.join(free)}: a free size, expected fixed ones; export the model for one size")
    generator = np.random.default_rng(seed)
    return {port.name: _random_array(generator, port, count) for port in ports}


def _random_array(generator: np.random.Generator, port: Port, count: int) -> NDArray[Any]:
    shape = (count, *port.shape)
    if port.dtype == "float32":
        return generator.standard_normal(shape, dtype=np.float32)
    if port.dtype == PIXEL:
        return generator.integers(0, 256, shape, dtype=np.uint8)
    return np.ones(shape, dtype=port.dtype)


def input_noun(feeds: Feeds) -> str:
    """Return "images" for feeds of only that name, else "inputs"."""
    return "images" if list(feeds) == ["images"] else "inputs"


def checked_feeds(feeds: Feeds, ports: Sequence[Port], *, where: str, batch: int | None = None) -> Feeds:
    """Return the feeds in the order of the ports, contiguous; `batch` is the only batch size that fits, None for any.

    Raises BadInput, naming every array that is missing, unknown, or of another type or shape, and unequal batches.
    """
    mismatches = [*_wrong_names(feeds, ports), *_wrong_arrays(feeds, ports, batch), *_unequal_batches(feeds)]
    if mismatches:
        raise BadInput(f"{where}: {'; '.join(mismatches)}")
    return {port.name: np.ascontiguousarray(feeds[port.name]) for port in ports}


def checked_outputs(outputs: Outputs, batch: int, *, where: str) -> Outputs:
    """Return the outputs. Raises BadInput unless each has a row for each of `batch` inputs."""
    misshapen = [f"{name} {list(each.shape)}" for name, each in outputs.items() if each.shape[:1] != (batch,)]
    if misshapen:
        raise BadInput(
            f"{where}: gives {', '.join(misshapen)} to a batch of {batch}, expected a row for each input, "
            f"[{batch}, ...]; export the model with the batch in front of its outputs"
        )
    return outputs


def shape_text(port: Port, batch: int | None = None) -> str:
    """Return a port's shape as text, such as `[B, 3, 32, 32]`; `batch` replaces B, and a free size is `?`."""
    sizes = ("?" if size < 0 else str(size) for size in port.shape)
    return f"[{', '.join(('B' if batch is None else str(batch), *sizes))}]"


def _wrong_names(feeds: Feeds, ports: Sequence[Port]) -> Iterator[str]:
    for port in ports:
        if port.name not in feeds:
            yield f"takes {port.name} {shape_text(port)} as {port.dtype}, which is missing"
    for name in feeds:
        if name not in _port_names(ports):
            yield f"takes no {name}, only {', '.join(_port_names(ports))}"


def _wrong_arrays(feeds: Feeds, ports: Sequence[Port], batch: int | None) -> Iterator[str]:
    for port in ports:
        if port.name in feeds:
            array = feeds[port.name]
            if array.dtype.name != port.dtype:
                yield f"takes {port.name} as {port.dtype}, got {array.dtype.name}"
            if not array.size:
                yield f"got no {port.name}, {list(array.shape)}; a batch has 1 or more"
            elif not _fits(array.shape, port, batch):
                yield f"takes {port.name} {shape_text(port, batch)}, got {list(array.shape)}"


def _fits(shape: tuple[int, ...], port: Port, batch: int | None) -> bool:
    if len(shape) != 1 + len(port.shape) or batch not in (None, shape[0]):
        return False
    return all(size < 0 or size == own for size, own in zip(port.shape, shape[1:], strict=True))


def _unequal_batches(feeds: Feeds) -> Iterator[str]:
    sizes = {name: len(array) for name, array in feeds.items() if array.ndim}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} of {name}" for name, size in sizes.items())
        yield f"got {listed}; expected as many of each, as they make one batch"


def _port_names(ports: Sequence[Port]) -> list[str]:
    return [port.name for port in ports]
