"""Images and texts prepared the way a given model was evaluated, and the digests that tie records together."""

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

from calib.image_arrays import Normalise
from calib.images import Images, open_images
from calib.inputs import InputSet
from calib.rows import SUFFIX, ArrayInputs, Sequences, open_arrays, open_ids, sample_sequences
from calib.texts import Texts, open_texts
from corp_deploy.families import traced_model
from corp_deploy.families.family import array_ports, count_ids, image_spec, sequence_spec, text_spec
from corp_deploy.families.timm_images import ImageSpec, image_spec_of_note
from corp_deploy.spec.merging import Merging
from corp_deploy.traced.models.module import assumes_size
from ground.errors import BadInput
from ground.files import text_from_file
from ground.pixels import PIXEL
from ground.ports import Port
from ground.records import record_from_bytes

from .checkpoint import Checkpoint
from .model_config import MergingEntry

MERGING = "merging"
MOST_TEXT = 2**29  # bytes of a text that becomes one stream of tokens


def images_for_model(
    model: nn.Module, path: Path, *, samples: int | None = None, seed: int = 0, workers: int = 0, max_bad: int = 0
) -> Images:
    """Open images at the model's input shape, folders through timm's evaluation transform; pixels [N,C,H,W] uint8
    are normalised. Raises calib's BadInput, one for folders where the model takes no RGB, and one for folders and
    pixels of a model that is not known to normalise them.
    """
    spec = image_spec(model)
    try:
        return open_images(
            path,
            image_shape=spec.shape,
            transform=_transform_of_folder(spec, path) if (path.is_dir() or path.suffix == ".tar") else no_picture,
            pixels=partial(normalising, spec, where=str(path)),
            samples=samples,
            seed=seed,
            workers=workers,
            max_bad=max_bad,
        )
    except BadInput as error:
        if path.is_dir() or not assumes_size(model):
            raise
        raise BadInput(
            f"{error}. The size {list(spec.shape)} is assumed, the first one that the module runs with; if it takes "
            "another, let it say so: `input_size = (3, height, width)`"
        ) from None


def left_out(path: Path, images: InputSet) -> str:
    """Say which files of a folder or shards were not read as images."""
    return f"{path}: {images.available} images; left out: {images.skipped}"


def pictures_for_port(
    port: Port, preprocessing: str, path: Path, *, where: str, samples: int | None, seed: int
) -> Images:
    """Open pictures without a model, by a graph's preprocessing; raw pixels as float32 for a port of uint8."""
    channels, height, width = port.shape
    prepared = image_spec_of_note(preprocessing, (channels, height, width), where=where)
    transform = _transform_of_folder(prepared, path)
    reads = partial(_pixels_of_picture, prepared, transform) if port.dtype == PIXEL else transform
    return open_images(path, image_shape=prepared.shape, transform=reads, samples=samples, seed=seed)


def normalising_by_note(preprocessing: str, port: Port, path: Path, *, where: str) -> Normalise:
    """What makes images of a file's pixels by the preprocessing that a graph carries; raises as `normalising` does."""
    channels, height, width = port.shape
    return normalising(image_spec_of_note(preprocessing, (channels, height, width), where=where), where=str(path))


def no_picture(picture: object) -> Tensor:
    """In place of a transform, where arrays are taken as they are."""
    raise AssertionError(picture)


def _transform_of_folder(spec: ImageSpec, path: Path) -> Callable[[Any], Tensor]:
    """Raises BadInput for a model that takes no RGB, or is not known to normalise it."""
    channels, height, width = spec.shape
    refusal = spec.normalisation_refusal
    pixels = f"; pixels can't be normalised: {refusal}" if refusal else ", or uint8"
    if channels != 3:
        raise BadInput(
            f"{path}: folders and tar shards give RGB, the model takes {channels} channel{'s'[: channels > 1]}; give "
            f".npy, .npz or .safetensors with images [N,{channels},{height},{width}] float32, preprocessed{pixels}"
        )
    spec.require_normalisation(where=str(path))
    return spec.transform()


def _pixels_of_picture(prepared: ImageSpec, transform: Callable[[Any], Tensor], picture: Any) -> Tensor:
    return torch.from_numpy(_as_float(prepared.normalisation.pixels(transform(picture).numpy())))


def unnormalised() -> Normalise:
    """Pixels as they are, in float32."""
    return _as_float


def _as_float(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    return pixels.astype(np.float32)


def normalising(spec: ImageSpec, *, where: str) -> Normalise:
    """What makes images of pixels. Raises BadInput for a model that is not known to normalise them."""
    spec.require_normalisation(where=where)
    return spec.normalisation.images


def texts_for_model(model: nn.Module, path: Path, *, samples: int | None = None, seed: int = 0) -> Texts | Sequences:
    """Open the documents of a text file, a line each, as the model's tokenizer cuts and pads them; for a decoder the
    whole text as sequences, or their ids (.npy) as `ids_for_model`. Raises calib's BadInput, and one for a model that
    takes no text.
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
    """Open token ids for a decoder. Raises calib's BadInput, and one for a model that takes none."""
    spec = sequence_spec(model)
    if spec is None:
        medium = traced_model.input_spec(model).medium
        raise BadInput(f"{path}: token ids are for a decoder, this model takes {medium}: give --{medium}")
    return open_ids(path, length=spec.shape[0], vocabulary=spec.vocabulary, samples=samples, seed=seed)


def arrays_for_model(model: nn.Module, path: Path, *, samples: int | None = None, seed: int = 0) -> ArrayInputs:
    """Open arrays, one for each of the model's inputs. Raises calib's BadInput, and one for a model of no arrays."""
    ports = array_ports(model)
    return open_arrays(path, ports, id_counts=count_ids(model), samples=samples, seed=seed)


def inputs_for_model(
    model: nn.Module, path: Path, *, samples: int | None = None, seed: int = 0, workers: int = 0, max_bad: int = 0
) -> InputSet:
    """Open what the model takes: images, texts, or arrays. Raises BadInput as these do."""
    match traced_model.input_spec(model).medium:
        case "images":
            return images_for_model(model, path, samples=samples, seed=seed, workers=workers, max_bad=max_bad)
        case "text":
            return texts_for_model(model, path, samples=samples, seed=seed)
        case "arrays":
            return arrays_for_model(model, path, samples=samples, seed=seed)


def preprocessing_text(model: nn.Module) -> str:
    """The evaluation preprocessing of this model as one text, to be kept, compared and shown."""
    return json.dumps(traced_model.input_spec(model).as_json(), sort_keys=True)


def model_digest(model: nn.Module) -> str:
    """Digest of every weight's name, type, shape and value; the same wherever and however the model was loaded."""
    return digest_of_tensors(sorted(model.state_dict().items()))


def digest_of_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """The same of a model's tensors, given in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def merging_text(model: nn.Module) -> str:
    """How the model merges tokens as one text, to be kept and compared; empty for one that merges none."""
    merging = traced_model.merging_of(model)
    return "" if merging is None else json.dumps(replace(merging, unmerged=False).as_json(), sort_keys=True)


def merging_of_moments(lineage: Mapping[str, str]) -> Merging | None:
    """How tokens were merged when moments of this lineage were taken. Raises BadInput for what is no merging."""
    text = lineage.get(MERGING)
    if text is None:
        return None
    return record_from_bytes(text.encode(), MergingEntry, where="the moments' merging").merging


def lineage_of_model(model: nn.Module, digest: str | None = None) -> dict[str, str]:
    """What tells moments which model they are of; `digest` is of its weights, where the model has none."""
    lineage = {"model": digest or model_digest(model), "preprocessing": preprocessing_text(model)}
    return lineage | ({MERGING: text} if (text := merging_text(model)) else {})


def lineage_for_moments(checkpoint: Checkpoint, inputs: InputSet, digest: str | None = None) -> dict[str, str]:
    """What moments carry so that they are never used for another model, and never merged across preprocessings."""
    return {
        "architecture": checkpoint.architecture.name,
        **lineage_of_model(checkpoint.model, digest),
        "images": inputs.digest,
    }
