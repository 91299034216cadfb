"""Vision transformers as Hugging Face transformers describes them in config.json.

Nothing is executed. A configuration is typed and bounded where it is read, with the defaults of its own class, since
transformers writes of a tower inside a larger model only what differs from them; what changes the arithmetic and has no
place in timm's VisionTransformer or Eva is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ground.errors import BadInput

from .text_config import CommonConfig
from .text_encoder import Width

Side = Annotated[int, Meta(ge=1, le=16_384)]
# msgspec 0.22 may crash on a fixed tuple of bounded numbers beside a bounded number.
Sides = Side | Annotated[tuple[Side, ...], Meta(min_length=2, max_length=2)]
Output = Literal["class token", "classes", "distilled", "class and patches", "projection", "attention pool"]
"""What a class of transformers makes of the last tokens."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A model_type: timm's name of such a model, the model's own name in its tensors, its class's defaults, the same
    tower by itself, and whether its attention reads `head_dim` from the configuration.
    """

    timm: str
    prefix: str
    defaults: Mapping[str, Any]
    base: str
    inside: str = ""
    reads_head_dim: bool = False


_SIZE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_GELU = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16}
_VIT = _SIZE | {"intermediate_size": 3072} | _GELU
_DINOV2 = _SIZE | {"mlp_ratio": 4} | _GELU | {"layer_norm_eps": 1e-6, "patch_size": 14}
_CLIP = _VIT | {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "patch_size": 32, "projection_dim": 512}
_SIGLIP = _VIT | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_DINOV3 = _VIT | {
    "hidden_size": 384,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
KINDS: Mapping[str, Kind] = {
    "vit": Kind("vit_base_patch16_224", "vit.", _VIT, "ViTModel", reads_head_dim=True),
    "deit": Kind("vit_base_patch16_224", "deit.", _VIT, "DeiTModel", reads_head_dim=True),
    "dinov2": Kind("vit_base_patch14_dinov2", "dinov2.", _DINOV2, "Dinov2Model", reads_head_dim=True),
    "dinov2_with_registers": Kind(
        "vit_base_patch14_reg4_dinov2",
        "dinov2_with_registers.",
        _DINOV2 | {"patch_size": 16, "num_register_tokens": 4},
        "Dinov2WithRegistersModel",
        reads_head_dim=True,
    ),
    "dinov3_vit": Kind("vit_base_patch16_dinov3", "dinov3_vit.", _DINOV3, "DINOv3ViTModel"),
    "clip_vision_model": Kind("vit_base_patch16_clip_224", "vision_model.", _CLIP, "CLIPVisionModel"),
    "clip": Kind("vit_base_patch16_clip_224", "vision_model.", _CLIP, "CLIPVisionModel", inside="vision_config"),
    "siglip_vision_model": Kind("vit_base_patch16_siglip_224", "vision_model.", _SIGLIP, "SiglipVisionModel"),
    "siglip": Kind(
        "vit_base_patch16_siglip_224", "vision_model.", _SIGLIP, "SiglipVisionModel", inside="vision_config"
    ),
}
# By the class that wrote a directory: its model_type, what it makes of the tokens, and which of its outputs that is.
_CLASSES: Mapping[str, tuple[str, Output, str]] = {
    "ViTModel": ("vit", "class token", "last_hidden_state[:, 0]"),
    "ViTForImageClassification": ("vit", "classes", "logits"),
    "DeiTModel": ("deit", "class token", "last_hidden_state[:, 0]"),
    "DeiTForImageClassification": ("deit", "classes", "logits"),
    "DeiTForImageClassificationWithTeacher": ("deit", "distilled", "logits"),
    "Dinov2Model": ("dinov2", "class token", "pooler_output"),
    "Dinov2ForImageClassification": ("dinov2", "class and patches", "logits"),
    "Dinov2WithRegistersModel": ("dinov2_with_registers", "class token", "pooler_output"),
    "Dinov2WithRegistersForImageClassification": ("dinov2_with_registers", "class and patches", "logits"),
    "DINOv3ViTModel": ("dinov3_vit", "class token", "pooler_output"),
    "CLIPVisionModel": ("clip_vision_model", "class token", "pooler_output"),
    "CLIPVisionModelWithProjection": ("clip_vision_model", "projection", "image_embeds"),
    "CLIPModel": ("clip", "projection", "image_embeds"),
    "SiglipVisionModel": ("siglip_vision_model", "attention pool", "pooler_output"),
    "SiglipModel": ("siglip", "attention pool", "pooler_output"),
}
CLASSES = tuple(_CLASSES)


def both(sides: int | tuple[int, ...]) -> tuple[int, int]:
    """Height and width, where one number stands for both."""
    height, width = sides if isinstance(sides, tuple) else (sides, sides)
    return height, width


class VisionConfig(CommonConfig, frozen=True, kw_only=True):
    """What is read of a config.json."""

    image_size: Sides
    patch_size: Sides
    intermediate_size: Width | None = None
    mlp_ratio: Annotated[float, Meta(gt=0.0, le=1024.0)] | None = None
    num_channels: Annotated[int, Meta(ge=1, le=1024)] = 3
    qkv_bias: bool = True
    use_swiglu_ffn: bool = False
    query_bias: bool = True
    key_bias: bool = False
    value_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    use_gated_mlp: bool = False
    rope_theta: Annotated[float, Meta(gt=0.0)] | None = None
    num_register_tokens: Annotated[int, Meta(ge=0, le=65_536)] = 0
    vision_use_head: bool = True
    projection_dim: Width | None = None
    head_dim: Width | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the images that its positions are of."""
        return both(self.image_size)

    @property
    def has_rope(self) -> bool:
        """Whether positions turn queries and keys, which timm's Eva has."""
        return self.rope_theta is not None

    @property
    def patch(self) -> tuple[int, int]:
        return both(self.patch_size)

    @property
    def hidden(self) -> int:
        """Rows of the first layer of its MLPs; of SwiGLU, two thirds of the ratio rounded up to 8, gate and value."""
        if self.mlp_ratio is None:
            assert self.intermediate_size is not None, self
            return self.intermediate_size
        wide = int(self.hidden_size * self.mlp_ratio)
        return 2 * ((int(wide * 2 / 3) + 7) // 8 * 8) if self.use_swiglu_ffn else wide


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModel:
    """A vision transformer of transformers: its configuration, which class wrote it, what that makes of the tokens, and
    which of the class's outputs it is.
    """

    config: VisionConfig
    architecture: str
    output: Output
    output_name: str
    classes: int

    @property
    def kind(self) -> Kind:
        return KINDS[self.config.model_type]


def _of_turned(config: VisionConfig) -> str:
    return "silu" if config.use_gated_mlp else "gelu"


def _refusal(config: VisionConfig, output: Output) -> str:
    width, heads = config.hidden_size, config.num_attention_heads
    reasons = config.refused(ACTIVATIONS) | {
        f"its activation is {config.hidden_act!r:.60}, expected {_of_turned(config)} of MLPs of its kind": (
            config.has_rope and config.hidden_act != _of_turned(config)
        ),
        "its projections or MLPs have no biases": config.has_rope and not (config.proj_bias and config.mlp_bias),
        f"heads of {width // heads} have no planes for two axes": config.has_rope and width // heads % 4 != 0,
        f"a width of {width} is no multiple of {heads} heads": width % heads != 0,
        f"its heads are {config.head_dim} wide instead of {width // heads}; read the model they were reduced from": (
            config.head_dim not in (None, width // heads)
        ),
        "vision_use_head is false, so that it has no pooled output": (
            output == "attention pool" and not config.vision_use_head
        ),
        f"patches of {config.patch} in images of {config.sides}": any(
            patch > side for patch, side in zip(config.patch, config.sides, strict=True)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _tower(config: Mapping[str, Any], kind: Kind, where: str) -> dict[str, Any]:
    inner: Any = config.get(kind.inside, {}) if kind.inside else config
    if not isinstance(inner, Mapping):
        raise BadInput(f"{where}: {kind.inside} is {inner!r:.60}, expected the vision tower's configuration")
    beside = {key: config[key] for key in ("projection_dim", "auto_map", "quantization_config") if key in config}
    return {**kind.defaults, **inner, **beside, "model_type": config["model_type"]}


def _class_of(config: Mapping[str, Any], without_head: bool, where: str) -> tuple[str, Output, str]:
    kind = KINDS[config["model_type"]]
    written = config.get("architectures") or [kind.base]
    name = written[0] if isinstance(written, list) and isinstance(written[0], str) else ""
    if without_head:
        base = kind.base
        return base, *_CLASSES[base][1:]
    if name not in _CLASSES or _CLASSES[name][0] not in (config["model_type"], f"{config['model_type']}_vision_model"):
        raise BadInput(
            f"{where}: architectures is {written!r:.100}, expected one of {', '.join(CLASSES)}; --model-kwargs "
            f"'{{\"num_classes\": 0}}' takes the tower as {kind.base} does"
        )
    return name, *_CLASSES[name][1:]


def _classes(config: Mapping[str, Any]) -> int:
    """How many classes a classifier has; transformers writes names of classes unless they are the default's two."""
    labels, count = config.get("id2label"), config.get("num_labels")
    if isinstance(labels, Mapping):
        return len(labels)
    return count if isinstance(count, int) and 0 <= count <= 10_000_000 else 2


def vision_model(config: Mapping[str, Any], *, where: str, without_head: bool = False) -> VisionModel:
    """The model that a config.json describes; without its head, as the class of the tower alone has it.

    Raises BadInput for another kind of model, and for what timm's model of the kind can't compute.
    """
    if config.get("model_type") not in KINDS:
        raise BadInput(f"{where}: model_type is {config.get('model_type')!r:.60}, expected one of {', '.join(KINDS)}")
    name, output, output_name = _class_of(config, without_head, where)
    kind = KINDS[config["model_type"]]
    try:
        read = msgspec.convert(_tower(config, kind, where), VisionConfig)
    except msgspec.ValidationError as error:
        raise BadInput(f"{where}: not the configuration of a {name}: {str(error)[:300]}") from None
    if reason := _refusal(read, output):
        raise BadInput(f"{where}: this {name} can't be built: {reason}")
    return VisionModel(config=read, architecture=name, output=output, output_name=output_name, classes=_classes(config))
