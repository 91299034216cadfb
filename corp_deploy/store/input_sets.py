"""Images, texts and arrays prepared for a model; digests of weights; lineages of moments."""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from calib.batch_inputs import BatchInputs, ImageBatches, SequenceBatches
from calib.batches import WHERE, Batches
from calib.image_arrays import Normalise
from calib.images import Images, holds_pictures, images_from_source, open_images
from calib.inputs import InputSet
from calib.rows import NAME, SUFFIX, ArrayInputs, Sequences, open_arrays, open_ids, sample_sequences
from calib.saved_datasets import dataset_source
from calib.texts import Texts, open_texts
from corp_deploy.families import traced_model
from corp_deploy.families.family import array_ports, image_spec, sequence_spec, text_spec
from corp_deploy.families.timm_images import ImageSpec, image_spec_of_note
from corp_deploy.spec.merging import Merging
from corp_deploy.traced.models.module import assumes_size
from ground.errors import BadInput
from ground.files import text_from_file
from ground.pixels import PIXEL
from ground.places import Place, require_path
from ground.ports import Port
from ground.records import record_from_bytes

from .checkpoint import Checkpoint
from .model_config import MergingEntry

MERGING = "merging"
MOST_TEXT = 2**29  # the most bytes of a text that becomes one stream of tokens


def images_for_model(
    model: nn.Module, path: Place, *, samples: int | None = None, seed: int = 0, workers: int = 0, max_bad: int = 0
) -> Images:
    """Open images at the model's input shape.

    Pictures go through timm's evaluation transform, and pixels [N,C,H,W] uint8 are normalised. Raises BadInput as
    `open_images` does, for pictures where the model takes no RGB, and for pictures and pixels where no normalisation is
    known.
    """
    spec = image_spec(model)
    try:
        return open_images(
            path,
            image_shape=spec.shape,
            transform=_transform_of_pictures(spec, path) if holds_pictures(path) else no_picture,
            pixels=partial(normalising, spec, where=str(path)),
            samples=samples,
            seed=seed,
            workers=workers,
            max_bad=max_bad,
        )
    except BadInput as error:
        if holds_pictures(path) or not assumes_size(model):
            raise
        raise BadInput(
            f"{error}. The size {list(spec.shape)} is assumed, the first one that the module runs with; if it takes "
            "another, set its attribute `input_size = (3, height, width)`"
        ) from None


def left_out(path: Place, images: InputSet) -> str:
    """Return a line with the number of images in a folder or shards and the files that were left out."""
    return f"{path}: {images.available} images; left out: {images.skipped}"


def pictures_for_port(
    port: Port, preprocessing: str, path: Place, *, where: str, samples: int | None, seed: int
) -> Images:
    """Open pictures by a graph's preprocessing; a port of uint8 gets pixels that are not normalised, as float32."""
    channels, height, width = port.shape
    prepared = image_spec_of_note(preprocessing, (channels, height, width), where=where)
    transform = _transform_of_pictures(prepared, path)
    reads = partial(_pixels_of_picture, prepared, transform) if port.dtype == PIXEL else transform
    return open_images(path, image_shape=prepared.shape, transform=reads, samples=samples, seed=seed)


def normalising_by_note(preprocessing: str, port: Port, path: Place, *, where: str) -> Normalise:
    """Return the function that normalises uint8 images by a graph's preprocessing. Raises as `normalising` does."""
    channels, height, width = port.shape
    return normalising(image_spec_of_note(preprocessing, (channels, height, width), where=where), where=str(path))


def no_picture(picture: object) -> Tensor:
    """Raise AssertionError; the transform of pictures where inputs are arrays alone, never to be called."""
    raise AssertionError(picture)


def _transform_of_pictures(spec: ImageSpec, path: Place) -> Callable[[Any], Tensor]:
    """Return the transform of pictures. Raises BadInput where the model takes no RGB or no normalisation is known."""
    channels, height, width = spec.shape
    refusal = spec.normalisation_refusal
    pixels = f"; pixels can't be normalised: {refusal}" if refusal else ", or uint8"
    if channels != 3:
        raise BadInput(
            f"{path}: pictures give RGB, the model takes {channels} channel{'s'[: channels > 1]}; give "
            f".npy, .npz or .safetensors with images [N,{channels},{height},{width}] float32, preprocessed{pixels}"
        )
    spec.require_normalisation(where=str(path))
    return spec.transform()


def _pixels_of_picture(prepared: ImageSpec, transform: Callable[[Any], Tensor], picture: Any) -> Tensor:
    return torch.from_numpy(_as_float(prepared.normalisation.pixels(transform(picture).numpy())))


def unnormalised() -> Normalise:
    """Return the function that casts uint8 images to float32 and does not normalise them."""
    return _as_float


def _as_float(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    return pixels.astype(np.float32)


def normalising(spec: ImageSpec, *, where: str) -> Normalise:
    """Return the function that normalises uint8 images to float32. Raises BadInput where no mean or std is known."""
    spec.require_normalisation(where=where)
    return spec.normalisation.images


def texts_for_model(model: nn.Module, path: Path, *, samples: int | None = None, seed: int = 0) -> Texts | Sequences:
    """Open a text file: one text a line for an encoder, cut and padded; the whole text as sequences for a decoder.

    A decoder also takes the ids of sequences (.npy), as `ids_for_model`. Raises BadInput as `open_texts` does, and for
    a model that takes no text.
    """
    spec = sequence_spec(model)
    if spec is None:
        return open_texts(path, encode=text_spec(model).encoder(), samples=samples, seed=seed)
    if path.suffix == SUFFIX:
        return ids_for_model(model, path, samples=samples, seed=seed)
    text = text_from_file(path, most_bytes=MOST_TEXT)
    lines = io.StringIO(text, newline="\n")
    ids_SN = spec.sequences(lines, where=str(path))
    return sample_sequences(ids_SN, where=str(path), samples=samples, seed=seed)


def ids_for_model(model: nn.Module, path: Path, *, samples: int | None = None, seed: int = 0) -> Sequences:
    """Open token ids for a decoder. Raises BadInput as `open_ids` does, and for a model that takes none."""
    spec = sequence_spec(model)
    if spec is None:
        medium = traced_model.input_spec(model).medium
        raise BadInput(f"{path}: token ids are for a decoder, this model takes {medium}: give --{medium}")
    return open_ids(path, length=spec.shape[0], vocabulary=spec.vocabulary, samples=samples, seed=seed)


def arrays_for_model(model: nn.Module, path: Path, *, samples: int | None = None, seed: int = 0) -> ArrayInputs:
    """Open one array for each input. Raises BadInput as `open_arrays` does, and for a model that takes none."""
    ports = array_ports(model)
    return open_arrays(path, ports, id_counts=traced_model.count_ids(model), samples=samples, seed=seed)


def batches_for_model(model: nn.Module, batches: Batches, *, max_bad: int = 0) -> BatchInputs:
    """Return batches in memory as the inputs that the model takes; texts come as token ids."""
    spec = traced_model.input_spec(model)
    if isinstance(spec, ImageSpec):
        pixels, transform = partial(normalising, spec, where=WHERE), spec.transform
        return ImageBatches(
            available=0, source=batches, ports=spec.ports, max_bad=max_bad, pixels=pixels, transform=transform
        )
    sequences = sequence_spec(model)
    if sequences is not None:
        counts = {NAME: sequences.vocabulary}
        return SequenceBatches(available=0, source=batches, ports=spec.ports, id_counts=counts, max_bad=max_bad)
    counts = traced_model.count_ids(model)
    return BatchInputs(available=0, source=batches, ports=spec.ports, id_counts=counts, max_bad=max_bad)


def inputs_for_model(
    model: nn.Module,
    given: Place | Batches,
    *,
    samples: int | None = None,
    seed: int = 0,
    workers: int = 0,
    max_bad: int = 0,
) -> InputSet:
    """Open the images, texts or arrays that the model takes. Raises BadInput as the functions for these do."""
    if isinstance(given, Batches):
        if given.dataset is not None:
            spec = image_spec(model)
            source = dataset_source(
                given.dataset, shape=spec.shape, transform=_transform_of_pictures(spec, Path(WHERE))
            )
            return images_from_source(
                source, spec.shape, samples=samples, seed=seed, workers=workers, max_bad=max_bad, where=WHERE
            )
        return batches_for_model(model, given, max_bad=max_bad).sampled(samples, seed, where=WHERE)
    path = given
    match traced_model.input_spec(model).medium:
        case "images":
            return images_for_model(model, path, samples=samples, seed=seed, workers=workers, max_bad=max_bad)
        case "text":
            return texts_for_model(model, require_path(path), samples=samples, seed=seed)
        case "arrays":
            return arrays_for_model(model, require_path(path), samples=samples, seed=seed)


def preprocessing_text(model: nn.Module) -> str:
    """Return the model's evaluation preprocessing as JSON text."""
    return json.dumps(traced_model.input_spec(model).as_json(), sort_keys=True)


def model_digest(model: nn.Module) -> str:
    """Return one SHA-256 of all weights' names, types, shapes and values, however the model was loaded.

    A model that merges tokens for MLPs alone has the digest of the model without.
    """
    return digest_of_tensors(sorted((traced_model.origin_of(model) or model).state_dict().items()))


def digest_of_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return one SHA-256 of the names, types, shapes and values of tensors in the order given."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def merging_text(model: nn.Module) -> str:
    """Return the merging of the model's residual stream, except `unmerged`, as JSON text; empty without merging."""
    merging = traced_model.merging_of(model)
    if merging is None or not merging.in_stream:
        return ""
    return json.dumps(replace(merging, unmerged=False).as_json(), sort_keys=True)


def merging_of_moments(lineage: Mapping[str, str]) -> Merging | None:
    """Return the token merging in a lineage of moments, None without any. Raises BadInput for an invalid entry."""
    text = lineage.get(MERGING)
    if text is None:
        return None
    return record_from_bytes(text.encode(), MergingEntry, where="the moments' merging").merging


def lineage_for_moments(checkpoint: Checkpoint, digest: str | None = None) -> dict[str, str]:
    """Return a model's part of the lineage of moments: architecture, preprocessing, merging, digest of weights.

    `digest` is that of the weights, for a model that was built without them.
    """
    model, merging = checkpoint.model, merging_text(checkpoint.model)
    return {
        "architecture": checkpoint.architecture.name,
        "model": digest or model_digest(model),
        "preprocessing": preprocessing_text(model),
        **({MERGING: merging} if merging else {}),
    }
