"""Images as they are named on the command line."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ground.quantities import BAD_IMAGES, IMAGES, SEED, WORKERS

from .numbers import Number
from .options import ANY_PATH, Command, Option, value_options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from calib.images import Images
    from corp_deploy.store.checkpoint import Checkpoint

IMAGES_HELP = "A folder of images, or .npy / .npz / .safetensors with float32 [N,3,H,W] that is already preprocessed."


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageChoice:
    """Which images, with their labels where there are any; how many, drawn by the seed, and how they are decoded."""

    path: Path | None
    labels: Path | None = None
    samples: int | None = None
    seed: int = 0
    workers: int = 0
    max_bad: int = 0

    def open(self, checkpoint: "Checkpoint") -> "Images":
        """The images as the model takes them."""
        from corp_deploy.store.inputs import images_for_model

        assert self.path is not None, self
        return images_for_model(
            checkpoint.model,
            self.path,
            samples=self.samples,
            seed=self.seed,
            workers=self.workers,
            max_bad=self.max_bad,
        )

    def class_indices(self, images: "Images", checkpoint: "Checkpoint") -> "NDArray[np.int64] | None":
        """Those of the opened images [N], where labels are given."""
        from corp_deploy.store.inputs import labels_from_path

        return None if self.labels is None else labels_from_path(self.labels, images, checkpoint.model)


def image_choice(
    images: Path | None = None,
    labels: Path | None = None,
    samples: int | None = None,
    seed: int = 0,
    workers: int = 0,
    max_bad: int = 0,
) -> ImageChoice:
    """From the options of these names."""
    return ImageChoice(path=images, labels=labels, samples=samples, seed=seed, workers=workers, max_bad=max_bad)


drawing_options: tuple[Option, ...] = (
    click.option(
        "--samples", type=Number(IMAGES), default=None, help="Use this many images, drawn by --seed; default: all."
    ),
    click.option("--seed", type=Number(SEED), default=0, show_default=True, help="Seed of the draw of --samples."),
)
decoding_options: tuple[Option, ...] = (
    click.option("--workers", type=Number(WORKERS), default=0, show_default=True, help="Processes that decode images."),
    click.option("--max-bad", type=Number(BAD_IMAGES), default=0, show_default=True, help="Unreadable images to skip."),
)


def images_option(*, required: bool = True, help: str = IMAGES_HELP) -> Option:
    """--images itself."""
    return click.option("--images", type=ANY_PATH, required=required, default=None, help=help)


def image_options(*options: Option) -> Callable[[Command], Command]:
    """Add these options and hand the command an `ImageChoice` as `images`."""
    return value_options("images", image_choice, *options)
