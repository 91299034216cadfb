"""The typed config.json of a model directory."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from corp_deploy.spec.merging import MOST_TOKENS, How, Merging, Metric
from corp_deploy.spec.outputs import NamedOutputs
from ground.errors import BadInput
from ground.records import Sha256, record_from_file

CONFIG, KIND = "config.json", "corp-deploy/model"
FITTED = "fitted"  # the entry of a lineage with the fingerprints of the inputs that the model was fitted to
REMEDY = "write the model again, such as with `corp-deploy reduce`"
_Pattern = Annotated[str, Meta(pattern="^[1-9]:[1-9]$")]


class SiteEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of a site's groups in the dense model, and the indices of the groups that a reduced site keeps."""

    groups: Annotated[int, Meta(ge=1, le=2**20)]
    kept: tuple[Annotated[int, Meta(ge=0, le=2**20)], ...] | UnsetType = UNSET


class TracedProgram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program that was narrowed: the digest of its sites, biases that repairs added, and the tracer's versions."""

    digest: Sha256
    biases: tuple[str, ...]
    versions: dict[str, str]


class MergingEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The token merging of a model; `schedule` has the number of tokens merged in each block."""

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
    """The name and the arguments from which a family builds the dense model."""

    name: str
    kwargs: dict[str, Any]


class ModelInput(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of an input without the batch, and the preprocessing as JSON values."""

    shape: tuple[Annotated[int, Meta(ge=1, le=2**20)], ...] = ()
    preprocessing: dict[str, Any]


_SIZES = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")


def _size(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The content of config.json: architecture, kept groups, merging, outputs, sparsity, input, digest, lineage."""

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
        """The indices of the groups that each reduced site keeps."""
        return {name: site.kept for name, site in self.sites.items() if site.kept is not UNSET}

    @property
    def named_outputs(self) -> NamedOutputs | None:
        """The named outputs, None for the model's own output."""
        return None if self.outputs is None else NamedOutputs(self.outputs)

    @property
    def architecture_line(self) -> str:
        """The class or the name of the model in its library, and the sizes that it was built with."""
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
    """Read config.json. Raises BadInput, naming the entry, for one that is missing, mistyped or impossible."""
    path = directory / CONFIG
    return record_from_file(path, ModelConfig, kind=KIND, remedy=REMEDY)
