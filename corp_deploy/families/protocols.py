"""Protocols of a model and its inputs, whatever library built it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from calib.inputs import Inputs
from ground.pixels import Normalisation
from ground.ports import OutputPort, Port

from .merging import Merging
from .sites import Sites
from .steps import Step
from .widths import HeadGeometry

Medium = Literal["images", "text", "arrays"]


class InputSpec(Protocol):
    """What a model takes: its ports, and how raw data becomes them, as text to be kept, compared and shown."""

    @property
    def ports(self) -> tuple[Port, ...]: ...

    @property
    def medium(self) -> Medium:
        """What people give."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first port, behind the batch."""
        ...

    def as_line(self) -> str:
        """The preparation for people."""
        ...

    def as_json(self) -> dict[str, Any]:
        """The preparation as plain JSON values, in one order."""
        ...


class ImageSpec(InputSpec, Protocol):
    """Images as a model takes them."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        ...

    @property
    def normalisation(self) -> Normalisation:
        """What the transform does to pixels once they are resized and cropped. Raises BadInput as
        require_normalisation does.
        """
        ...

    @property
    def normalisation_refusal(self) -> str:
        """What mean and std are known instead, empty where those of the model's channels are."""
        ...

    def require_normalisation(self, *, where: str, instead: str = "") -> None:
        """Raises BadInput where no mean or no std of the model's channels is known. `instead`: what to do without."""
        ...

    def transform(self) -> Callable[[Any], Tensor]:
        """An RGB image of PIL -> float32 [C,H,W]. Raises BadInput as require_normalisation does."""
        ...


class Family(Protocol):
    """What is told of a model."""

    def sites(self, model: nn.Module) -> Sites:
        """Where the model can be reduced, dense or already reduced, and what is refused with the reason."""
        ...

    def steps(self, model: nn.Module) -> Iterator[Step]:
        """From the first residual stream to the last, for evaluation, in the order they run."""
        ...

    def embedded(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """The residual stream [B,N,C] that enters the first step."""
        ...

    def finished(self, model: nn.Module, x_BNC: Tensor, inputs: Inputs) -> Tensor:
        """The model's output for the residual stream behind its last step."""
        ...

    def token_kinds(self, model: nn.Module) -> tuple[str, ...]:
        """What each token of the last residual stream is, in order."""
        ...

    def depth(self, model: nn.Module) -> int:
        """How many blocks the model has."""
        ...

    def input_spec(self, model: nn.Module) -> InputSpec: ...

    def output_ports(self, model: nn.Module) -> tuple[OutputPort, ...]: ...

    def classes(self, model: nn.Module) -> int:
        """How many classes the model tells apart; 0 for one that has no classifier."""
        ...

    def token_weights(self, model: nn.Module, inputs: Inputs) -> Tensor | None:
        """Weight of each token [B,N] in sums over tokens, 0 for padding; None where all count alike."""
        ...

    def with_merging(self, model: nn.Module, merging: Merging | None) -> nn.Module:
        """A copy in eval mode that merges tokens so, or none. Raises BadInput where it can't."""
        ...

    def merging_of(self, model: nn.Module) -> Merging | None:
        """How the model merges tokens, None for one that doesn't."""
        ...

    def merging_refusal(self, model: nn.Module) -> str:
        """Why tokens of the model can't be merged, or nothing."""
        ...

    def exportable(self, model: nn.Module, *, geometry: HeadGeometry | None = None) -> nn.Module:
        """A copy in eval mode whose attention is spelled MatMul-Softmax-MatMul. `geometry` replaces that of heads whose
        q/k and v widths differ; None keeps each as it is.
        """
        ...

    def extra_files(self, model: nn.Module) -> Mapping[str, str]:
        """The content of what must stand beside the weights in a model directory, by file name."""
        ...

    def load_extra_files_(self, model: nn.Module, directory: Path) -> None:
        """Give a model just built what stands beside its weights. Raises BadInput for what is missing or another's."""
        ...
