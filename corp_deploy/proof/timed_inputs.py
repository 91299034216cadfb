"""What is fed to models while they are timed: images or texts of a file, or noise, which costs the same time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calib.fingerprints import Fingerprints
from calib.images import ARRAYS, Images, open_images
from calib.inputs import Batch, Inputs, InputSet, tensors_by_name
from calib.sources import Normalise, Pixels
from corp_deploy.families.family import image_spec
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.inputs import no_picture, normalising, texts_for_model, unnormalised
from ground.errors import BadInput
from ground.feeds import Feeds, random_feeds
from ground.pixels import PIXEL, whole_pixels
from ground.ports import Port


def listed(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.name} {port.shape}" + f" {port.dtype}" * (port.dtype != "float32") for port in ports)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedInputs:
    """What is fed while models are timed: preprocessed images of a file, the texts of one, or neither (noise)."""

    images: Path | None = None
    text: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFeeds:
    """What is fed, and what identifies it where it is real."""

    feeds: Feeds
    fingerprints: Fingerprints | None = None
    noun: str = "inputs"


def _first(source: InputSet, count: int) -> Batch[Inputs]:
    return next(batch for batch in source.read(min(count, source.count)) if len(batch.ids))


def _tokenized(text: Path, models: Sequence[Path], count: int) -> TimedFeeds:
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
    return TimedFeeds(feeds=feeds, fingerprints=Fingerprints(ids=batch.ids), noun=source.noun)


def _images_or_noise(path: Path | None, ports: Sequence[Port], models: Sequence[Path], count: int) -> TimedFeeds:
    """So many images of a file, over again where it has fewer; noise without one, and of tokens the same one."""
    if path is None:
        return TimedFeeds(feeds=random_feeds(ports, count, seed=0))
    if len(ports) != 1 or len(ports[0].shape) != 3:
        raise BadInput(f"{path}: images for a model that takes {listed(ports)}; leave --images out")
    if path.suffix not in ARRAYS:
        raise BadInput(f"{path}: no transform is known here; expected preprocessed images, {', '.join(ARRAYS)}")
    images, fingerprints = _images(path, ports[0], models, count)
    feeds = {ports[0].name: np.resize(images, (count, *ports[0].shape))}
    return TimedFeeds(feeds=feeds, fingerprints=fingerprints, noun=Images.noun)


def _images(path: Path, port: Port, models: Sequence[Path], count: int) -> tuple[NDArray[Any], Fingerprints]:
    """Up to `count` of a file, as the port takes them; pixels are normalised as the first model directory says."""
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
    uint8_images = whole_pixels(images, where=str(path)) if port.dtype == PIXEL else images
    return uint8_images, Fingerprints.of(batch.ids, batch.inputs)


def _of_directory(directory: Path, path: Path) -> Normalise:
    return normalising(image_spec(model_of_directory(directory).model), where=str(path))


def feeds_to_time(fed: TimedInputs, ports: Sequence[Port], models: Sequence[Path], count: int) -> TimedFeeds:
    """So many inputs for these ports; among `models` is the tokenizer. Raises BadInput for what does not fit."""
    if fed.text is None:
        return _images_or_noise(fed.images, ports, models, count)
    if not all(port.dtype == "int64" for port in ports):
        raise BadInput(f"{fed.text}: texts for a model that takes {listed(ports)}; leave --text out")
    return _tokenized(fed.text, models, count)
