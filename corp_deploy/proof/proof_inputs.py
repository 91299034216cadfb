"""Inputs of a proof: arrays by the names of the model's ports; images are normalised or pixels. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corp_deploy.spec.class_labels import class_folder
from ground.errors import BadInput
from ground.feeds import Feeds, batch_size, random_feeds, single_array
from ground.pixels import PIXEL, Normalisation
from ground.ports import Port
from perf.parity.parity import ImageSet

if TYPE_CHECKING:
    from calib.fingerprints import Fingerprints
    from corp_deploy.families.timm_images import ImageSpec


def take_pixels(ports: Sequence[Port]) -> bool:
    """Return True if there is a single port and its type is uint8."""
    return len(ports) == 1 and ports[0].dtype == PIXEL


def normalisation_of(spec: "ImageSpec | None", where: str) -> Normalisation:
    """Return the normalisation of a preprocessing; raise BadInput if `spec` is None or has no normalisation."""
    if spec is None:
        raise BadInput(f"{where}: takes uint8 images, the dense model takes no images; export it from that model")
    spec.require_normalisation(where=where, instead="take a graph that takes float32")
    return spec.normalisation


def feeds_for_ports(feeds: Feeds, ports: Sequence[Port], spec: "ImageSpec | None", *, where: str) -> Feeds:
    """Return the feeds for these ports, as pixels if the ports take pixels."""
    if not take_pixels(ports) or single_array(feeds).dtype == PIXEL:
        return feeds
    return {ports[0].name: normalisation_of(spec, where).pixels(single_array(feeds))}


def require_pixels(feeds: Feeds, ports: Sequence[Port], spec: "ImageSpec | None", *, where: str) -> None:
    """Raise BadInput if the ports take pixels but the images aren't normalised pixels from 0 to 255."""
    if take_pixels(ports) and single_array(feeds).dtype != PIXEL:
        normalisation_of(spec, where).require_pixels(single_array(feeds), where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofInputs:
    """The model's inputs [N, ...] by name, their kind, and their labels if there are any.

    `names` are the inputs' names, none if an input couldn't be read. `digest` identifies the set; it is empty for timed
    inputs. `fingerprints` identify the single inputs, None for random ones.
    """

    feeds: Feeds
    digest: str = ""
    kind: str = "images"
    labels: NDArray[np.int64] | None = None
    names: tuple[str, ...] = ()
    fingerprints: "Fingerprints | None" = None

    @property
    def count(self) -> int:
        return batch_size(self.feeds)

    @property
    def class_folders(self) -> dict[int, str]:
        """The folder of each class's inputs by the class's index, {} unless every class has one of its own."""
        pairs = (
            set() if self.labels is None else {*zip(self.labels.tolist(), map(class_folder, self.names), strict=False)}
        )
        folders = dict(pairs)
        return folders if len(folders) == len({*folders.values()} - {""}) == len(pairs) else {}

    @property
    def images(self) -> ImageSet:
        return ImageSet(count=self.count, digest=self.digest, kind=self.kind)


class ArrayFile:
    """A temporary file of rows that are written one after the other and then read as one array."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115  (the array maps it)
        self._dtype, self._shape, self._count = np.dtype(np.float32), tuple[int, ...](), 0

    def append(self, rows: NDArray[Any]) -> None:
        self._dtype, self._shape, self._count = rows.dtype, rows.shape[1:], self._count + len(rows)
        self._file.write(np.ascontiguousarray(rows).data)

    def array(self) -> NDArray[Any]:
        """Return all rows, mapped from the file, which is closed."""
        with self._file as file:
            file.flush()
            return np.memmap(file, dtype=self._dtype, mode="r+", shape=(self._count, *self._shape))


def draw_noise(ports: Sequence[Port], count: int, seed: int) -> ProofInputs:
    """Draw normal noise for ports of float32, random pixels for uint8; raise BadInput for ports of another type."""
    other = [f"{port.name} ({port.dtype})" for port in ports if port.dtype not in ("float32", PIXEL)]
    if other:
        raise BadInput(
            f"random inputs: expected inputs of float32 or uint8, this model takes {', '.join(other)}; give real ones"
        )
    return ProofInputs(feeds=random_feeds(ports, count, seed=seed), digest=f"random seed {seed}", kind="random")


def ports_line(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.name} {port.shape}" + f" {port.dtype}" * (port.dtype != "float32") for port in ports)
