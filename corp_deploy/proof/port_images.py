"""Images for an engine or a graph without its model. Arrays are read without torch."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from calib.image_arrays import ARRAYS, DrawnImages, ImageArray, Normalise, Pixels, draw_images
from ground.errors import BadInput
from ground.feeds import single_array
from ground.pixels import PIXEL, whole_pixels
from ground.places import Place
from ground.ports import Port

from .proof_inputs import ArrayFile, ProofInputs

_ROWS = 64  # images copied at once


def images_of_port(
    port: Port, preprocessing: str | None, path: Place, *, where: str, samples: int | None, seed: int
) -> ProofInputs:
    """Read images for an input: arrays, or folders and shards by the preprocessing that the graph notes.

    Arrays of pixels are normalised; an input of uint8 takes the pixels themselves. Raises BadInput if the input takes
    no images, or images need decoding and the graph notes no preprocessing.
    """
    is_array = path.suffix in ARRAYS and not (isinstance(path, Path) and path.is_dir())
    if len(port.shape) != 3 or (preprocessing is None and not is_array):
        needs = "notes no preprocessing" if len(port.shape) == 3 else f"takes {port.name} instead of images"
        raise BadInput(
            f"{where}: {needs}, so images can't be prepared for it; give --images as preprocessed .npy, .npz or "
            ".safetensors, or --random"
        )
    if is_array:
        channels, height, width = port.shape
        pixels = _pixels(port, preprocessing, path, where=where)
        opened = ImageArray.from_path(path, shape=(channels, height, width), pixels=pixels)
        read = _read(draw_images(opened, samples=samples, seed=seed))
    else:
        from corp_deploy.store.input_sets import pictures_for_port

        from .model_inputs import inputs_from_set

        assert preprocessing is not None, where
        read = inputs_from_set(pictures_for_port(port, preprocessing, path, where=where, samples=samples, seed=seed))
    if port.dtype != PIXEL:
        return read
    return replace(read, feeds={port.name: whole_pixels(single_array(read.feeds), where=str(path))})


def _pixels(port: Port, preprocessing: str | None, path: Place, *, where: str) -> Pixels | None:
    """Return a maker of the function from pixels to inputs: the noted normalisation, or a cast for uint8; or None."""
    if port.dtype == PIXEL:
        return lambda: lambda pixels: pixels.astype(np.float32)
    if preprocessing is None:
        return None

    def normalise_by_note() -> Normalise:
        from corp_deploy.store.input_sets import normalising_by_note

        return normalising_by_note(preprocessing, port, path, where=where)

    return normalise_by_note


def _read(source: DrawnImages) -> ProofInputs:
    rows, images = source.rows(), ArrayFile()
    while part := list(islice(rows, _ROWS)):
        images.append(np.stack(part))
    return ProofInputs(feeds={"images": images.array()}, digest=source.digest, kind=source.noun, names=source.names)
