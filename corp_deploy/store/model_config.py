"""config.json of a model directory, typed where it is read."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from corp_deploy.spec.merging import MOST_TOKENS, How, Merging, Metric
from corp_deploy.spec.outputs import NamedOutputs
from ground.errors import BadInput
from ground.records import Sha256, record_from_file

CONFIG, KIND = "config.json", "corp-deploy/model"
FITTED = "fitted"  # entry of a lineage: what identifies the inputs that the model was fitted to
REMEDY = "write the model again, such as with `corp-deploy reduce`"
_Pattern = Annotated[str, Meta(pattern="^[1-9]:[1-9]$")]


class SiteEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The groups of a site in the dense model, and those that are kept where not all are."""

    groups: Annotated[int, Meta(ge=1, le=2**20)]
    kept: tuple[Annotated[int, Meta(ge=0, le=2**20)], ...] | UnsetType = UNSET


class TracedProgram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which program was narrowed: the digest of its sites, biases that repairs added, and what it was traced by."""

    digest: Sha256
    biases: tuple[str, ...]
    versions: dict[str, str]


class MergingEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model merges tokens, an entry a block."""

    schedule: Annotated[tuple[Annotated[int, Meta(ge=0, le=MOST_TOKENS)], ...], Meta(min_length=1, max_length=256)]
    metric: Metric
    how: How
    unmerged: bool

    def __post_init__(self) -> None:
        _ = self.merging

    @property
    def merging(self) -> Merging:
        return Merging(schedule=self.schedule, metric=self.metric, how=self.how, unmerged=self.unmerged)


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """What a family builds the dense model from."""

    name: str
    kwargs: dict[str, Any]


class ModelInput(msgspec.Struct, frozen=True, kw_only=True):
    """The shape behind the batch, and how what a user has becomes that: all of it, as JSON values."""

    shape: tuple[Annotated[int, Meta(ge=1, le=2**20)], ...] = ()
    preprocessing: dict[str, Any]


_SIZES = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")


def _size(value: Any) -> str:
    """Write a size, or the sides of an image as 224x224."""
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The content of config.json: how the dense model is built, what is kept of its sites, and its weights' digest."""

    family: str = "timm"
    timm: Built | None = None
    architecture: Built | None = None
    sites: dict[str, SiteEntry]
    merging: MergingEntry | None = None
    outputs: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    program: TracedProgram | None = None
    sparsity: dict[str, _Pattern] = msgspec.field(default_factory=dict)
    input: ModelInput
    weights_sha256: Sha256
    lineage: dict[str, Any]

    def __post_init__(self) -> None:
        _ = self.named_outputs
        if (self.timm if self.family == "timm" else self.architecture) is None:
            raise BadInput(f"the key {'timm' if self.family == 'timm' else 'architecture'!r} is missing")

    @property
    def sizes(self) -> dict[str, int]:
        """The number of groups of each site of the dense model."""
        return {name: site.groups for name, site in self.sites.items()}

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The groups that are kept of each site that is reduced."""
        return {name: site.kept for name, site in self.sites.items() if site.kept is not UNSET}

    @property
    def named_outputs(self) -> NamedOutputs | None:
        """What the model gives by name, None for its own output."""
        return None if self.outputs is None else NamedOutputs(self.outputs)

    @property
    def architecture_line(self) -> str:
        """The class that the model's library calls it, else its name there, and the sizes that it was built with."""
        source = self.lineage.get("source")
        written = source.get("class") if isinstance(source, dict) else None
        sizes = (f"{name} {_size(value)}" for name, value in self.built.kwargs.items() if name in _SIZES)
        return " ".join((str(written or self.built.name), f"({', '.join(sizes)})")).removesuffix(" ()")

    @property
    def built(self) -> Built:
        built = self.timm if self.family == "timm" else self.architecture
        assert built is not None, self.family
        return built


def load_model_config(directory: Path) -> ModelConfig:
    """Raises BadInput, naming the entry, for one that is missing, of another type or impossible."""
    path = directory / CONFIG
    return record_from_file(path, ModelConfig, kind=KIND, remedy=REMEDY)
