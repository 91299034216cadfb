"""What a proof is made on, as it is said on the command line: real inputs, or random ones where they are meant."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.table import VERIFY
from ground.quantities import IMAGES
from ground.quantity import BATCH

from .input_choice import (
    InputChoice,
    arrays_option,
    drawing_options,
    groups_option,
    images_option,
    input_choice,
    text_option,
    tokens_option,
)
from .options import FILE, explicit_options, value_options
from .value import Value

if TYPE_CHECKING:
    from corp_deploy.proof.artefact import Artefact
    from corp_deploy.proof.inputs import ProofInputs
    from corp_deploy.store.checkpoint import Checkpoint

NO_INPUTS = "give --images, --text or --arrays, or --random when random inputs are really meant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofInputChoice:
    """Real images or texts or, where they are really meant, so many random inputs; the seed is of either's draw.
    `moments`: of the images that these are compared with.
    """

    real: InputChoice
    random: int | None
    moments: Path | None

    def __post_init__(self) -> None:
        if self.real.path is not None and self.random is not None:
            raise click.UsageError(NO_INPUTS)

    @property
    def way(self) -> str:
        if self.random is not None:
            return "random"
        return "none" if self.real.path is None else "images"

    @property
    def words(self) -> str:
        """As they are typed."""
        return self.real.words if self.random is None else f"--random {self.random} --seed {self.real.seed}"

    def require(self) -> None:
        """Raises UsageError without any."""
        if self.way == "none":
            raise click.UsageError(NO_INPUTS)

    def open_for_engine(self, artefact: "Artefact") -> "ProofInputs":
        """As an engine takes them, without its model. Raises BadInput for texts and for what can't be prepared."""
        from calib.arrays import open_arrays
        from corp_deploy.proof.inputs import inputs_from_set, noise_inputs, of_port
        from corp_deploy.store.inputs import images_for_port
        from ground.errors import BadInput

        if self.random is not None:
            return noise_inputs(artefact.inputs, self.random, self.real.seed)
        drawn: dict[str, Any] = {"samples": self.real.samples, "seed": self.real.seed}
        if self.real.arrays is not None:
            return inputs_from_set(open_arrays(self.real.arrays, artefact.inputs, known={}, **drawn))
        if self.real.images is None or len(artefact.inputs) > 1:
            raise BadInput(
                f"{artefact.path}: an engine is compared on --images, --arrays or --random; its tokenizer isn't here"
            )
        (port,), where = artefact.inputs, str(artefact.path)
        source = images_for_port(port, artefact.preprocessing, self.real.images, where=where, **drawn)
        return of_port(inputs_from_set(source), port, where=str(self.real.images))

    def open(self, dense: "Checkpoint", *, pixels: bool = False) -> "ProofInputs":
        """`pixels`: random ones are made of pixels."""
        from corp_deploy.proof.inputs import inputs_from_set, random_inputs

        if self.random is not None:
            return random_inputs(dense, self.random, self.real.seed, pixels=pixels)
        parts = self.real.parts(dense)
        source = parts.fitted if parts.held_out is None else parts.held_out
        return inputs_from_set(source, self.real.class_indices(source, dense))


def _proof_input_choice(random: int | None, moments: Path | None, **options: Any) -> ProofInputChoice:
    choice = ProofInputChoice(real=input_choice(**options), random=random, moments=moments)
    VERIFY.refuse([("", choice.way)], explicit_options())
    return choice


proof_input_options = value_options(
    "inputs",
    _proof_input_choice,
    images_option(),
    text_option(),
    tokens_option(),
    arrays_option(),
    click.option("--random", type=Value(BATCH), default=None, help="Random inputs instead; the record says so."),
    click.option(
        "--labels",
        type=FILE,
        default=None,
        help="Class indices of the images in their order (.npy, or key labels of .npz).",
    ),
    click.option("--moments", type=FILE, default=None, help="Say whether these images look like those of calibration."),
    *drawing_options,
    click.option(
        "--hold-out",
        type=Value(IMAGES),
        default=None,
        help="Only those that calibrate --hold-out N left out, with the same --images, --samples, --seed and --groups.",
    ),
    groups_option,
)
