"""Options of a model's inputs: files, draw, decoding, held-out inputs, labels. Torch is imported to open them."""

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from corp_deploy.spec.class_labels import LABELS_HELP
from ground.errors import BadInput
from ground.places import Place
from ground.quantity import BAD_IMAGES, IMAGES, SEED, WORKERS

from .option import Record, option
from .option_support import spelled
from .table import INPUTS
from .values import FILE, PLACE, TEXT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from calib.images import Images
    from calib.inputs import InputSet
    from calib.splits import Split
    from corp_deploy.store.checkpoint import Checkpoint

Inputs = TypeVar("Inputs", bound="InputSet")
KINDS = ("images", "text", "tokens", "arrays")


def refuse_several(chosen: Collection[str]) -> None:
    """Raise BadInput if `chosen`, the names of options for inputs, has more than one name."""
    if len(chosen) > 1:
        first, second = map(spelled, list(chosen)[:2])
        raise BadInput(f"{first} and {second} exclude each other; give what the model takes")


@dataclass(frozen=True, kw_only=True)
class Drawn(Record, heading="Inputs"):
    """The number of inputs to use, and the seed that draws them."""

    samples: int | None = option(IMAGES, help="Use this many images, drawn by --seed; default: all.")
    seed: int = option(SEED, 0, help="Seed of the draw of --samples.")

    @property
    def drawn(self) -> dict[str, Any]:
        return {"samples": self.samples, "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class Decoded(Record, heading="Inputs"):
    """The number of processes that decode images, and the number of unreadable images to skip at most."""

    workers: int = option(WORKERS, 0, help="Processes that decode images.")
    max_bad: int = option(BAD_IMAGES, 0, help="Unreadable images to skip.")

    @property
    def decoded(self) -> dict[str, Any]:
        return {"workers": self.workers, "max_bad": self.max_bad}


@dataclass(frozen=True, kw_only=True)
class HoldOutOptions(Record, heading="Inputs"):
    """The number and groups of the inputs that `calibrate` held out. Raises BadInput for groups without `hold_out`."""

    hold_out: int | None = option(
        IMAGES,
        help="The N of calibrate --hold-out, with the same --images, --samples, --seed and --groups: reduce leaves "
        "those images out too, and verify judges on them only.",
    )
    groups: str | None = option(TEXT, help="With --hold-out: the --groups that calibrate was given.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups is not None and self.hold_out is None:
            raise BadInput("--groups says which images --hold-out takes together; give both, or none")

    def split(self, inputs: Inputs, seed: int) -> "Split[Inputs]":
        """Return the inputs that `calibrate` fits to, and those that it holds out (None without `hold_out`)."""
        from calib.splits import split_for_calibration

        return split_for_calibration(inputs, hold_out=self.hold_out, groups=self.groups, seed=seed)

    def proving(self, inputs: Inputs, seed: int) -> Inputs:
        """Return the part of `inputs` that a model is proved on: those held out, or all without `hold_out`."""
        parts = self.split(inputs, seed)
        return parts.fitted if parts.held_out is None else parts.held_out


@dataclass(frozen=True, kw_only=True)
class InputOptions(HoldOutOptions, Decoded, Drawn):
    """The path of images, texts, tokens or arrays (or none), and of labels. Raises BadInput for two kinds of inputs."""

    images: Place | None = option(
        PLACE,
        help="A folder of images with its subfolders, in the formats that Pillow reads; tar shards, x.tar or "
        "'x-{000..099}.tar', also packed (.tar.gz, .tar.bz2, .tar.xz, .tar.zst); parquet files, x.parquet, "
        "'x-{000..099}.parquet' or a folder of them, with a column of encoded images as bytes or as Hugging Face's "
        "struct, found by itself or named as in x.parquet#NAME; a directory of datasets.save_to_disk; or .npy / .npz / "
        ".safetensors (key images) with [N,C,H,W], float32 that is already preprocessed, or uint8 pixels, resized and "
        "cropped. Each of them may be a URL that fsspec opens, such as s3://, gs:// or hf://.",
    )
    text: Path | None = option(
        FILE, help="For a text encoder: UTF-8 text, one document per line. For a decoder: one text, cut into sequences."
    )
    tokens: Path | None = option(
        FILE, help="For a decoder: token ids, an integer .npy with one sequence per row, or one stream."
    )
    arrays: Path | None = option(
        FILE,
        help="For a model of arrays: .npz or .safetensors with an array for each input under its name, or a .npy "
        "for a single input.",
    )
    labels: Path | None = option(FILE, help=LABELS_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_several(self._chosen_paths)

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        if self.path is not None and self.images is None:
            INPUTS.refuse([("", "text" if self.arrays is None else "arrays")], options)

    @property
    def _chosen_paths(self) -> dict[str, Place]:
        return {name: path for name in KINDS if (path := self.values[name]) is not None}

    @property
    def path(self) -> Place | None:
        return next(iter(self._chosen_paths.values()), None)

    @property
    def describe(self) -> str:
        return f"{spelled(next(iter(self._chosen_paths), 'images'))} {shlex.quote(str(self.path))}"

    def open(self, checkpoint: "Checkpoint", note: Callable[[str], None]) -> "InputSet":
        """Open the inputs for a model; `note` is called with a sentence if unreadable images were skipped.

        Raises BadInput for a model that takes another kind of inputs.
        """
        from corp_deploy.store.input_sets import arrays_for_model, ids_for_model, texts_for_model

        if self.text is not None:
            return texts_for_model(checkpoint.model, self.text, **self.drawn)
        if self.tokens is not None:
            return ids_for_model(checkpoint.model, self.tokens, **self.drawn)
        if self.arrays is not None:
            return arrays_for_model(checkpoint.model, self.arrays, **self.drawn)
        return self._open_images(checkpoint.model, note, **self.decoded)

    def _open_images(self, model: "nn.Module", note: Callable[[str], None], **decoded: Any) -> "Images":
        from corp_deploy.store.input_sets import images_for_model, left_out

        assert self.images is not None, self
        images = images_for_model(model, self.images, **self.drawn, **decoded)
        if images.skipped:
            note(left_out(self.images, images))
        return images

    def proving_images(self, model: "nn.Module", note: Callable[[str], None] = lambda text: None) -> "Images":
        """Return the images that a model is proved on: those held out, or all without `hold_out`.

        Raises BadInput as images_for_model does, and for fewer images than `hold_out` asks for.
        """
        return self.proving(self._open_images(model, note), self.seed)

    def class_indices(
        self, inputs: "InputSet", checkpoint: "Checkpoint", note: Callable[[str], None]
    ) -> "NDArray[np.int64] | None":
        """Return the class indices [N] of opened inputs, None without labels."""
        from corp_deploy.store.labels import labels_for

        return None if self.labels is None else labels_for(self.labels, inputs, checkpoint.model, note)


@dataclass(frozen=True, kw_only=True)
class RequiredInputs(InputOptions):
    """The path of images, texts, tokens or arrays, and of labels. Raises BadInput without inputs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None:
            raise BadInput(
                "Missing option '--images', or '--text' or '--tokens' for a model that takes text, or '--arrays' for "
                "one of arrays."
            )
