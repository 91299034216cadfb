"""What a proof is made on: all inputs as they are fed to the models, under the names of the model's ports, images
normalised or as the pixels that they were made of; and what is fed while they are timed: images or texts of a file, or
noise, which costs the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calib.fingerprints import Fingerprints
from calib.images import ARRAYS, open_images
from calib.inputs import Batch, Inputs, InputSet, tensors_by_name
from calib.sources import Normalise, Pixels
from corp_deploy.families import traced_model
from corp_deploy.families.family import image_spec, input_ports
from corp_deploy.families.timm_images import ImageSpec
from corp_deploy.invocation.running import FedOptions
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.inputs import no_picture, normalising, texts_for_model, unnormalised
from corp_deploy.store.onnx_file import GraphInput, graph_ports
from ground.errors import BadInput
from ground.feeds import Feeds, batch_size, random_feeds, rows_of, single_array
from ground.pixels import PIXEL, Normalisation, whole_pixels
from ground.ports import Port
from perf.parity.parity import ImageSet


def take_pixels(ports: Sequence[Port]) -> bool:
    """Whether these are the ports of a graph or an engine that takes pixels."""
    return len(ports) == 1 and ports[0].dtype == PIXEL


def _normalisation(spec: ImageSpec | None, where: str) -> Normalisation:
    """Raises BadInput for a model of no images, and for one that is not known to normalise them."""
    if spec is None:
        raise BadInput(f"{where}: takes uint8 images, the dense model takes none; export it from that model")
    spec.require_normalisation(where=where, instead="take a graph that takes float32")
    return spec.normalisation


def fed_to_ports(feeds: Feeds, ports: Sequence[Port], spec: ImageSpec | None, *, where: str) -> Feeds:
    """The feeds for these ports, of images as they are told of: pixels where the ports take those, else as they are."""
    if not take_pixels(ports) or single_array(feeds).dtype == PIXEL:
        return feeds
    return {ports[0].name: _normalisation(spec, where).pixels(single_array(feeds))}


def require_pixels(feeds: Feeds, ports: Sequence[Port], spec: ImageSpec | None, *, where: str) -> None:
    """Raises BadInput where ports take pixels and the images were not made of any."""
    if take_pixels(ports) and single_array(feeds).dtype != PIXEL:
        _normalisation(spec, where).require_pixels(single_array(feeds), where=where)


def images_taken(checkpoint: Checkpoint) -> ImageSpec | None:
    """How images become a model's input; None of a model that takes none."""
    of_images = traced_model.input_spec(checkpoint.model).medium == "images"
    return image_spec(checkpoint.model) if of_images else None


def fed_to_graph(checkpoint: Checkpoint, feeds: Feeds, graph_input: GraphInput) -> Feeds:
    """Feeds of the model as a graph of it takes them. Raises BadInput for images that were not made of pixels."""
    spec, ports, where = images_taken(checkpoint), graph_ports(checkpoint, graph_input), f"input {graph_input}"
    require_pixels(feeds, ports, spec, where=where)
    return fed_to_ports(feeds, ports, spec, where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofInputs:
    """What a proof is made on: the model's inputs [N, ...] by name, what they are, labels where there are any; names
    where none of them had to be left out; what identifies them where they are real. None has a digest of those timed.
    """

    feeds: Feeds
    digest: str = ""
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
    """Normal noise instead of images, for who asks for it; the record says so. `pixels`: any pixels, normalised. Raises
    BadInput for a model whose inputs are no floats: which of them mean something only real ones show.
    """
    ports = input_ports(dense.model)
    spec = images_taken(dense)
    if not pixels or spec is None:
        return noise_inputs(ports, count, seed)
    normalisation = _normalisation(spec, "random pixels")
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
    return ProofInputs(feeds=random_feeds(ports, count, seed=seed), digest=f"random seed {seed}", kind="random")


def listed(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.name} {port.shape}" + f" {port.dtype}" * (port.dtype != "float32") for port in ports)


def _first(source: InputSet, count: int) -> Batch[Inputs]:
    return next(batch for batch in source.read(min(count, source.count)) if len(batch.ids))


def _tokenized(text: Path, models: Sequence[Path], count: int) -> ProofInputs:
    """So many texts of a file, over again where it has fewer, by the tokenizer of the first model that has one."""
    directory = next((path for path in models if path.is_dir()), None)
    if directory is None:
        raise BadInput(
            f"{text}: a graph or an engine has no tokenizer; name a model directory, or leave --text out: any tokens "
            "cost the same time"
        )
    source = texts_for_model(model_of_directory(directory).model, text)
    batch = _first(source, count)
    feeds = {
        name: np.resize(each.numpy(), (count, *each.shape[1:])) for name, each in tensors_by_name(batch.inputs).items()
    }
    return ProofInputs(feeds=feeds, kind=source.noun, fingerprints=Fingerprints(ids=batch.ids))


def _images_or_noise(path: Path | None, ports: Sequence[Port], models: Sequence[Path], count: int) -> ProofInputs:
    """So many images of a file, over again where it has fewer, as the port takes them, normalised as the first model
    directory says; noise without a file, and of tokens the same one.
    """
    if path is None:
        return ProofInputs(feeds=random_feeds(ports, count, seed=0), kind="inputs")
    if len(ports) != 1 or len(ports[0].shape) != 3:
        raise BadInput(f"{path}: images for a model that takes {listed(ports)}; leave --images out")
    if path.suffix not in ARRAYS:
        raise BadInput(f"{path}: no transform is known here; expected preprocessed images, {', '.join(ARRAYS)}")
    (port,) = ports
    channels, height, width = port.shape
    directory = next((each for each in models if each.is_dir()), None)
    pixels: Pixels | None = None
    if port.dtype == PIXEL:
        pixels = unnormalised
    elif directory is not None:
        pixels = partial(_of_directory, directory, path)
    source = open_images(path, image_shape=(channels, height, width), transform=no_picture, pixels=pixels)
    batch = _first(source, count)
    images: NDArray[np.float32] = tensors_by_name(batch.inputs)["input"].numpy()
    values: NDArray[Any] = whole_pixels(images, where=str(path)) if port.dtype == PIXEL else images
    return ProofInputs(
        feeds={port.name: np.resize(values, (count, *port.shape))},
        fingerprints=Fingerprints.of(batch.ids, batch.inputs),
    )


def _of_directory(directory: Path, path: Path) -> Normalise:
    return normalising(image_spec(model_of_directory(directory).model), where=str(path))


def feeds_to_time(fed: FedOptions, ports: Sequence[Port], models: Sequence[Path], count: int) -> ProofInputs:
    """So many inputs for these ports; among `models` is the tokenizer. Raises BadInput for what does not fit."""
    if fed.text is None:
        return _images_or_noise(fed.images, ports, models, count)
    if not all(port.dtype == "int64" for port in ports):
        raise BadInput(f"{fed.text}: texts for a model that takes {listed(ports)}; leave --text out")
    return _tokenized(Path(fed.text), models, count)
