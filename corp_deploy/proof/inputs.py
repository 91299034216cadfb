"""What a proof is made on: all inputs as they are fed to the models, under the names of the model's ports."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calib.fingerprints import Fingerprints
from calib.inputs import InputSet
from corp_deploy.families.family import input_ports
from corp_deploy.store.checkpoint import Checkpoint
from ground.errors import BadInput
from ground.feeds import Feeds, batch_size, random_feeds, rows_of, single_array
from ground.pixels import PIXEL, whole_pixels
from ground.ports import Port
from perf.parity.parity import ImageSet

from .pixels import pixels_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofInputs:
    """What a proof is made on: the model's inputs [N, ...] by name, what they are, labels where there are any; names
    where none of them had to be left out; what identifies them where they are real.
    """

    feeds: Feeds
    digest: str
    kind: str = "images"
    labels: NDArray[np.int64] | None = None
    names: tuple[str, ...] = ()
    fingerprints: Fingerprints | None = None

    @property
    def count(self) -> int:
        return batch_size(self.feeds)

    @property
    def images(self) -> ImageSet:
        """As a record says what they are."""
        return ImageSet(count=self.count, digest=self.digest, kind=self.kind)


def inputs_from_set(source: InputSet, labels: NDArray[np.int64] | None = None) -> ProofInputs:
    """All inputs of a set as they are fed to the model, decoded once, in files without a name instead of memory.

    Tensors that have no name are images.
    """
    arrays: dict[str, NDArray[Any]] = {}
    start, fingerprints = 0, list[Fingerprints]()
    for batch in source.read(64):
        if not len(batch.ids):
            continue
        fingerprints.append(Fingerprints.of(batch.ids, batch.inputs))
        tensors = {"images": batch.inputs} if isinstance(batch.inputs, Tensor) else batch.inputs
        parts = {name: tensor.numpy() for name, tensor in tensors.items()}
        count = batch_size(parts)
        arrays = arrays or {name: _on_disk(part, source.count) for name, part in parts.items()}
        for name, part in parts.items():
            arrays[name][start : start + count] = part
        start += count
    assert arrays, source
    feeds = rows_of(arrays, slice(start))
    names = tuple(source.name(place) for place in range(source.count)) if start == source.count else ()
    return ProofInputs(
        feeds=feeds,
        digest=source.digest,
        kind=source.noun,
        labels=labels,
        names=names,
        fingerprints=Fingerprints.concatenated(fingerprints),
    )


def _on_disk(like: NDArray[Any], count: int) -> NDArray[Any]:
    """Room for `count` of what `like` holds some of; the mapping keeps the file until the last array on it is gone."""
    with TemporaryFile() as file:
        return np.memmap(file, dtype=like.dtype, mode="w+", shape=(count, *like.shape[1:]))


def random_inputs(dense: Checkpoint, count: int, seed: int, *, pixels: bool = False) -> ProofInputs:
    """Normal noise instead of images, for who asks for it; the record says so. `pixels`: any pixels,
    normalised.

    Raises BadInput for a model whose inputs are no floats: which of them mean something only real ones show.
    """
    ports = input_ports(dense.model)
    made_of = pixels_of(dense)
    if not pixels or made_of.spec is None:
        return noise_inputs(ports, count, seed)
    normalisation = made_of.normalisation("random pixels")
    noise = noise_inputs([replace(port, dtype=PIXEL) for port in ports], count, seed)
    return replace(noise, feeds={name: normalisation.images(each) for name, each in noise.feeds.items()})


def of_port(inputs: ProofInputs, port: Port, *, where: str) -> ProofInputs:
    """Images as this port takes them; values 0 to 255 where it takes pixels. Raises BadInput for others there."""
    if port.dtype != PIXEL:
        return inputs
    return replace(inputs, feeds={port.name: whole_pixels(single_array(inputs.feeds), where=where)})


def noise_inputs(ports: Sequence[Port], count: int, seed: int) -> ProofInputs:
    """The same for these ports."""
    other = [f"{port.name} ({port.dtype})" for port in ports if port.dtype not in ("float32", PIXEL)]
    if other:
        raise BadInput(
            f"random inputs: expected inputs of float32 or uint8, this model takes {', '.join(other)}; give real ones"
        )
    feeds = random_feeds(ports, count, seed=seed)
    return ProofInputs(feeds=feeds, digest=f"random seed {seed}", kind="random")
