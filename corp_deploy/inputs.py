"""Images prepared the way a given model was evaluated, and the digests that tie records together."""

import hashlib
import json
from pathlib import Path

import torch
from torch import nn

from calib.images import Images, open_images

from . import vit
from .checkpoint import Checkpoint
from .files import sha256_of_text


def images_for_model(
    model: nn.Module, path: Path, *, samples: int | None = None, seed: int = 0, workers: int = 0
) -> Images:
    """Open images at the model's input shape, folders through timm's evaluation transform. Raises calib's BadInput."""
    spec = vit.input_spec(model)
    return open_images(
        path, image_shape=spec.shape, transform=spec.transform(), samples=samples, seed=seed, workers=workers
    )


def preprocessing_digest(model: nn.Module) -> str:
    """Digest of timm's evaluation preprocessing of this model."""
    return sha256_of_text(json.dumps(vit.input_spec(model).as_json(), sort_keys=True))


def model_digest(model: nn.Module) -> str:
    """Digest of every weight's name, type, shape and value; the same wherever and however the model was loaded."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def lineage_for_moments(checkpoint: Checkpoint, images: Images) -> dict[str, str]:
    """What moments carry so that they are never used for another model, and never merged across preprocessings."""
    return {
        "architecture": checkpoint.architecture.name,
        "model": model_digest(checkpoint.model),
        "preprocessing": preprocessing_digest(checkpoint.model),
        "images": images.digest,
    }
