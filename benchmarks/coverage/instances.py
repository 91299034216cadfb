"""Small instances of timm's names and of classes of transformers, for the chain.

An instance keeps the characteristic parts of its architecture (stem, pooling, norms, gates, position embedding, layer
scale). It has fewer blocks, and heads of 16 dimensions each, by default as many as the model of its name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.coverage.group import Group
from benchmarks.coverage.timm_names import TIMM

Source = Literal["timm", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A small model of a library; `family` is its name in the support table.

    `head_dim` is the width of each of the model's own heads, None if the arguments give it.
    """

    source: Source
    family: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int | None = None

    @property
    def key(self) -> dict[str, str]:
        """Return the fields that name the instance in records."""
        return {"source": self.source, "family": self.family, "name": self.name}


_TOWER: Mapping[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 64,
    "patch_size": 16,
}
_ENCODER: Mapping[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 384,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}
_MLP: Mapping[str, Any] = {"intermediate_size": 384}
TRANSFORMERS: tuple[Group, ...] = (
    Group(
        family="ViT",
        names=("ViTModel", "ViTForImageClassification"),
        kwargs={**_TOWER, **_MLP},
    ),
    Group(
        family="DeiT",
        names=("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
        kwargs={**_TOWER, **_MLP},
    ),
    Group(
        family="DINOv2",
        names=(
            "Dinov2Model",
            "Dinov2ForImageClassification",
            "Dinov2WithRegistersModel",
            "Dinov2WithRegistersForImageClassification",
        ),
        kwargs=_TOWER,
    ),
    Group(family="CLIP", names=("CLIPVisionModel", "CLIPVisionModelWithProjection"), kwargs={**_TOWER, **_MLP}),
    Group(family="SigLIP", names=("SiglipVisionModel",), kwargs={**_TOWER, **_MLP}),
    Group(family="DINOv3", names=("DINOv3ViTModel",), kwargs={**_TOWER, **_MLP}),
    Group(family="BERT", names=("BertModel", "RobertaModel"), kwargs=_ENCODER),
)


def _of(source: Source, groups: tuple[Group, ...]) -> Iterator[Instance]:
    for group in groups:
        for name in group.names:
            head_dim = group.head_dim if source == "timm" else None
            yield Instance(source=source, family=group.family, name=name, kwargs=group.kwargs, head_dim=head_dim)


INSTANCES: tuple[Instance, ...] = (
    *_of("timm", TIMM),
    *_of("transformers", TRANSFORMERS),
)
