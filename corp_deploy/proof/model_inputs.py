"""Inputs of proofs and timings: images, texts and arrays in the form that a model takes, or noise for its ports."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calib.fingerprints import Fingerprints
from calib.image_arrays import ARRAYS, Normalise, Pixels
from calib.images import open_images
from calib.inputs import Inputs, InputSet, ReadBatch, tensors_by_name
from corp_deploy.families import traced_model
from corp_deploy.families.family import image_spec, input_ports
from corp_deploy.families.timm_images import ImageSpec
from corp_deploy.invocation.running import FedOptions
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.input_sets import no_picture, normalising, texts_for_model, unnormalised
from corp_deploy.store.onnx_file import GraphInput, graph_ports
from ground.errors import BadInput
from ground.feeds import Feeds
from ground.pixels import PIXEL, whole_pixels
from ground.places import Place
from ground.ports import Port

from .proof_inputs import (
    ArrayFile,
    ProofInputs,
    draw_noise,
    feeds_for_ports,
    normalisation_of,
    ports_line,
    require_pixels,
)


def preprocessing_of(checkpoint: Checkpoint) -> ImageSpec | None:
    """Return a model's preprocessing of images, or None if it doesn't take images."""
    of_images = traced_model.input_spec(checkpoint.model).medium == "images"
    return image_spec(checkpoint.model) if of_images else None


def feeds_for_graph(checkpoint: Checkpoint, feeds: Feeds, graph_input: GraphInput) -> Feeds:
    """Return feeds of the model in the form that its graph takes."""
    spec, ports, where = preprocessing_of(checkpoint), graph_ports(checkpoint, graph_input), f"input {graph_input}"
    require_pixels(feeds, ports, spec, where=where)
    return feeds_for_ports(feeds, ports, spec, where=where)


def inputs_from_set(source: InputSet, labels: NDArray[np.int64] | None = None) -> ProofInputs:
    """Decode all inputs of a set once, into temporary files instead of memory.

    A tensor without a name is called "images".
    """
    files, count, fingerprints = defaultdict[str, ArrayFile](ArrayFile), 0, list[Fingerprints]()
    for batch in source.read(64):
        if not len(batch.ids):
            continue
        fingerprints.append(Fingerprints.from_inputs(batch.ids, batch.inputs))
        tensors = {"images": batch.inputs} if isinstance(batch.inputs, Tensor) else batch.inputs
        for name, tensor in tensors.items():
            files[name].append(tensor.numpy())
        count += len(batch.ids)
    assert count, source
    source = source.identified()
    return ProofInputs(
        feeds={name: file.array() for name, file in files.items()},
        digest=source.digest,
        kind=source.noun,
        labels=labels,
        names=tuple(source.name(place) for place in range(source.count)) if count == source.count else (),
        fingerprints=Fingerprints.concatenated(fingerprints),
    )


def draw_random_inputs(dense: Checkpoint, count: int, seed: int, *, pixels: bool = False) -> ProofInputs:
    """Draw normal noise or, with `pixels`, normalised random pixels; the record names them random.

    Raises BadInput if the model takes integers, such as token ids: random ones have no meaning.
    """
    ports = input_ports(dense.model)
    spec = preprocessing_of(dense)
    if not pixels or spec is None:
        return draw_noise(ports, count, seed)
    normalisation = normalisation_of(spec, "random pixels")
    noise = draw_noise([replace(port, dtype=PIXEL) for port in ports], count, seed)
    return replace(noise, feeds={name: normalisation.images(each) for name, each in noise.feeds.items()})


def _first(source: InputSet, count: int) -> ReadBatch[Inputs]:
    return next(batch for batch in source.read(min(count, source.count)) if len(batch.ids))


def _tokenized(text: Path, models: Sequence[Path], count: int) -> ProofInputs:
    """Tokenize `count` texts of a file, repeated if it has fewer, by the first model directory's tokenizer."""
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


def _repeated_images(path: Place, ports: Sequence[Port], models: Sequence[Path], count: int) -> ProofInputs:
    """Read `count` images of a file, repeated if it has fewer.

    Pixels are normalised by the first model directory, unless the port takes pixels.
    """
    if len(ports) != 1 or len(ports[0].shape) != 3:
        raise BadInput(f"{path}: images for a model that takes {ports_line(ports)}; leave --images out")
    if path.suffix not in ARRAYS:
        raise BadInput(f"{path}: images are not transformed here; expected preprocessed ones, {', '.join(ARRAYS)}")
    (port,) = ports
    channels, height, width = port.shape
    directory = next((each for each in models if each.is_dir()), None)
    pixels: Pixels | None = None
    if port.dtype == PIXEL:
        pixels = unnormalised
    elif directory is not None:
        pixels = partial(_normalise_of, directory, path)
    source = open_images(path, image_shape=(channels, height, width), transform=no_picture, pixels=pixels)
    batch = _first(source, count)
    images: NDArray[np.float32] = tensors_by_name(batch.inputs)["input"].numpy()
    values: NDArray[Any] = whole_pixels(images, where=str(path)) if port.dtype == PIXEL else images
    return ProofInputs(
        feeds={port.name: np.resize(values, (count, *port.shape))},
        fingerprints=Fingerprints.from_inputs(batch.ids, batch.inputs),
    )


def _normalise_of(directory: Path, path: Place) -> Normalise:
    return normalising(image_spec(model_of_directory(directory).model), where=str(path))


def open_timed_inputs(fed: FedOptions, ports: Sequence[Port], models: Sequence[Path], count: int) -> ProofInputs:
    """Return `count` inputs for these ports; a tokenizer or normalisation comes from `models`."""
    if fed.text is None:
        assert fed.images is not None, fed
        return _repeated_images(fed.images, ports, models, count)
    if not all(port.dtype == "int64" for port in ports):
        raise BadInput(f"{fed.text}: texts for a model that takes {ports_line(ports)}; leave --text out")
    return _tokenized(Path(fed.text), models, count)
