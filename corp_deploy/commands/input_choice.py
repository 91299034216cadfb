"""Images and texts as they are named on the command line."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.table import INPUTS
from ground.quantities import BAD_IMAGES, IMAGES, SEED, WORKERS

from .options import ANY_PATH, FILE, Command, Option, explicit_options, value_options
from .value import Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from calib.input_set import InputSet
    from calib.parts import Parts
    from corp_deploy.store.checkpoint import Checkpoint

TEXT_HELP = "For a text encoder: UTF-8 text, a line a document. For a decoder: one text, cut into sequences."
TOKENS_HELP = "For a decoder: token ids, whole numbers .npy, a row a sequence or one stream."
ARRAYS_HELP = "For a model of arrays: .npz or .safetensors with one for each input, by its name; of one a .npy too."
IMAGES_HELP = "A folder of images, or .npy / .npz / .safetensors with float32 [N,3,H,W] that is already preprocessed."


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChoice:
    """Which images with their labels where there are any, or which texts; how many, drawn by the seed, and how images
    are decoded. `hold_out`, with `groups`: how many of them calibrate was told to hold out.

    Raises UsageError for both at once, and for groups of which none are held out.
    """

    images: Path | None = None
    text: Path | None = None
    tokens: Path | None = None
    arrays: Path | None = None
    labels: Path | None = None
    samples: int | None = None
    seed: int = 0
    workers: int = 0
    max_bad: int = 0
    hold_out: int | None = None
    groups: str | None = None

    def __post_init__(self) -> None:
        if len(self._given) > 1:
            first, second = list(self._given)[:2]
            raise click.UsageError(f"{first} and {second} exclude each other; give what the model takes")
        if self.groups is not None and self.hold_out is None:
            raise click.UsageError("--groups says which images --hold-out takes together; give both, or none")

    @property
    def _given(self) -> dict[str, Path]:
        """By the option that they were given by."""
        options = {"--images": self.images, "--text": self.text, "--tokens": self.tokens, "--arrays": self.arrays}
        return {option: path for option, path in options.items() if path is not None}

    @property
    def path(self) -> Path | None:
        return next(iter(self._given.values()), None)

    @property
    def words(self) -> str:
        """The option by which they were given, as a command line has it."""
        option = next(iter(self._given), "--images")
        return f"{option} {shlex.quote(str(self.path))}"

    def open(self, checkpoint: "Checkpoint") -> "InputSet":
        """The inputs as the model takes them. Raises BadInput for a model that takes the other kind."""
        from corp_deploy.store.inputs import arrays_for_model, ids_for_model, images_for_model, texts_for_model

        drawn: dict[str, Any] = {"samples": self.samples, "seed": self.seed}
        if self.text is not None:
            return texts_for_model(checkpoint.model, self.text, **drawn)
        if self.tokens is not None:
            return ids_for_model(checkpoint.model, self.tokens, **drawn)
        if self.arrays is not None:
            return arrays_for_model(checkpoint.model, self.arrays, **drawn)
        assert self.images is not None, self
        decoded = {"workers": self.workers, "max_bad": self.max_bad}
        return images_for_model(checkpoint.model, self.images, **drawn, **decoded)

    def parts(self, checkpoint: "Checkpoint") -> "Parts[InputSet]":
        """What calibrate fits to, and what it holds out, none without `hold_out`. Raises BadInput as `open` does."""
        from calib.parts import parts_of

        return parts_of(self.open(checkpoint), hold_out=self.hold_out, groups=self.groups, seed=self.seed)

    def class_indices(self, inputs: "InputSet", checkpoint: "Checkpoint") -> "NDArray[np.int64] | None":
        """Those of the opened images [N], where labels are given."""
        from calib.images import Images
        from corp_deploy.store.inputs import labels_from_path

        if self.labels is None:
            return None
        assert isinstance(inputs, Images), inputs  # texts with labels were refused
        return labels_from_path(self.labels, inputs, checkpoint.model)


def input_choice(**options: Any) -> InputChoice:
    """From the options of these names; those that are typed and that texts would ignore are refused."""
    choice = InputChoice(**options)
    if choice.path is not None and choice.images is None:
        INPUTS.refuse([("", "text" if choice.arrays is None else "arrays")], explicit_options())
    return choice


def _required_choice(**options: Any) -> InputChoice:
    choice = input_choice(**options)
    if choice.path is None:
        raise click.UsageError(
            "Missing option '--images', or '--text' or '--tokens' for a model that takes text, or '--arrays' for one "
            "of arrays."
        )
    return choice


drawing_options: tuple[Option, ...] = (
    click.option(
        "--samples", type=Value(IMAGES), default=None, help="Use this many images, drawn by --seed; default: all."
    ),
    click.option("--seed", type=Value(SEED), default=0, show_default=True, help="Seed of the draw of --samples."),
)
groups_option: Option = click.option(
    "--groups", default=None, help="With --hold-out: which images belong together, as calibrate --groups was told."
)
decoding_options: tuple[Option, ...] = (
    click.option("--workers", type=Value(WORKERS), default=0, show_default=True, help="Processes that decode images."),
    click.option("--max-bad", type=Value(BAD_IMAGES), default=0, show_default=True, help="Unreadable images to skip."),
)


def images_option(*, help: str = IMAGES_HELP) -> Option:
    """--images itself."""
    return click.option("--images", type=ANY_PATH, default=None, help=help)


def text_option(*, help: str = TEXT_HELP) -> Option:
    """--text itself."""
    return click.option("--text", type=FILE, default=None, help=help)


def tokens_option(*, help: str = TOKENS_HELP) -> Option:
    """--tokens itself."""
    return click.option("--tokens", type=FILE, default=None, help=help)


def arrays_option(*, help: str = ARRAYS_HELP) -> Option:
    """--arrays itself."""
    return click.option("--arrays", type=FILE, default=None, help=help)


def input_options(*options: Option, required: bool = True) -> Callable[[Command], Command]:
    """Add these options and hand the command an `InputChoice` as `inputs`."""
    return value_options("inputs", _required_choice if required else input_choice, *options)
