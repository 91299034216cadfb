"""The inputs of a proof on the command line: real ones, or random ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corp_deploy.invocation.inputs import InputOptions
from corp_deploy.invocation.option import option
from corp_deploy.invocation.table import VERIFY
from ground.errors import BadInput
from ground.quantity import BATCH

if TYPE_CHECKING:
    from corp_deploy.proof.artefact import Artefact
    from corp_deploy.proof.inputs import ProofInputs
    from corp_deploy.store.checkpoint import Checkpoint

NO_INPUTS = "give --images, --text or --arrays, or --random when random inputs are really meant"


@dataclass(frozen=True, kw_only=True)
class ProofInputChoice(InputOptions):
    """Real images or texts or, where they are really meant, so many random inputs; the seed is of either's draw."""

    random: int | None = option(BATCH, help="Random inputs instead; the record says so.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None and self.random is not None:
            raise BadInput(NO_INPUTS)

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        super().refuse_ignored(options)
        VERIFY.refuse([("", self.way)], options)

    @property
    def way(self) -> str:
        if self.random is not None:
            return "random"
        return "none" if self.path is None else "images"

    @property
    def describe(self) -> str:
        """As they are typed."""
        return super().describe if self.random is None else f"--random {self.random} --seed {self.seed}"

    def require(self) -> None:
        """Raises BadInput without any."""
        if self.way == "none":
            raise BadInput(NO_INPUTS)

    def open_for_engine(self, artefact: "Artefact") -> "ProofInputs":
        """As an engine takes them, without its model. Raises BadInput for texts and for what can't be prepared."""
        from calib.rows import open_arrays
        from corp_deploy.proof.inputs import inputs_from_set, noise_inputs, of_port
        from corp_deploy.store.inputs import images_for_port

        if self.random is not None:
            return noise_inputs(artefact.inputs, self.random, self.seed)
        if self.arrays is not None:
            return inputs_from_set(open_arrays(self.arrays, artefact.inputs, id_counts={}, **self.drawn))
        if self.images is None or len(artefact.inputs) > 1:
            raise BadInput(
                f"{artefact.path}: an engine is compared on --images, --arrays or --random; its tokenizer isn't here"
            )
        (port,), where = artefact.inputs, str(artefact.path)
        source = images_for_port(port, artefact.preprocessing, self.images, where=where, **self.drawn)
        return of_port(inputs_from_set(source), port, where=str(self.images))

    def of_model(self, dense: "Checkpoint", *, pixels: bool = False) -> "ProofInputs":
        """`pixels`: random ones are made of pixels."""
        from corp_deploy.proof.inputs import inputs_from_set, random_inputs

        if self.random is not None:
            return random_inputs(dense, self.random, self.seed, pixels=pixels)
        source = self.proving(self.open(dense), self.seed)
        return inputs_from_set(source, self.class_indices(source, dense))
