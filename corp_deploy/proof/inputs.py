"""What a proof is made on: all inputs as they are fed to the models, under the names of the model's ports."""

from dataclasses import dataclass
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray

from calib.images import Images
from corp_deploy.families.family import input_ports
from corp_deploy.store.checkpoint import Checkpoint
from ground.errors import BadInput
from ground.feeds import Feeds, batch_size, noise_of_ports


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofInputs:
    """What a proof is made on: the model's inputs [N, ...] by name, what they are, labels where there are any."""

    feeds: Feeds
    digest: str
    kind: str = "images"
    labels: NDArray[np.int64] | None = None

    @property
    def count(self) -> int:
        return batch_size(self.feeds)


def given_from_images(images: Images, labels: NDArray[np.int64] | None = None) -> ProofInputs:
    """All images of a source as they are fed to the model, decoded once, in a file without a name instead of memory."""
    pixels: NDArray[np.float32] | None = None
    done = 0
    for batch in images.batches(64):
        part = batch.numpy()
        if pixels is None:
            with TemporaryFile() as file:  # the mapping keeps it until the last array on it is gone
                pixels = np.memmap(file, dtype=np.float32, mode="w+", shape=(images.count, *part.shape[1:]))
        pixels[done : done + len(part)] = part
        done += len(part)
    assert pixels is not None, images
    return ProofInputs(feeds={"images": pixels[:done]}, digest=images.digest, labels=labels)


def random_inputs(dense: Checkpoint, count: int, seed: int) -> ProofInputs:
    """Normal noise instead of images, for who asks for it; the record says so.

    Raises BadInput for a model whose inputs are no floats: which of them mean something only real ones show.
    """
    ports = input_ports(dense.model)
    whole = [f"{port.name} ({port.dtype})" for port in ports if port.dtype != "float32"]
    if whole:
        raise BadInput(
            f"random inputs: expected inputs of float32, this model takes {', '.join(whole)}; give real ones"
        )
    feeds = noise_of_ports(ports, count, seed=seed)
    return ProofInputs(feeds=feeds, digest=f"random seed {seed}", kind="random")
