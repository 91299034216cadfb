"""Small models without a family, of timm, torchvision and transformers: plain modules that declare their inputs.

Their weights are random, with correlated channels.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from .models import spread_
from .own import OWN, TOKENS, WORDS
from .timm_classes import CLASSES

Builder = Callable[[], nn.Module]
CLASSES_TOLD = 10
SIDE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A small model of a class; `name` is its name in the library, if it has one."""

    source: str
    kind: str
    name: str
    build: Builder
    side: int = SIDE

    @property
    def image(self) -> tuple[int, int, int]:
        return (3, self.side, self.side)


def dense(small: Small, seed: int) -> nn.Module:
    """Return the model with structured random weights, and batch norms with the statistics of its inputs.

    A model that takes other inputs than images declares them in `inputs`.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = small.build().eval()
    spread_(model, seed)
    if not hasattr(model, "inputs"):
        model.input_size = small.image  # type: ignore[assignment]
    settle_(model, {name: torch.from_numpy(each) for name, each in drawn(model, 16, seed).items()})
    return model.requires_grad_(False)


def drawn(model: nn.Module, count: int, seed: int) -> dict[str, NDArray[Any]]:
    """Draw a model's inputs by name: smooth images with noise, tokens (padded if there is a mask), or vectors."""
    generator, numpy = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    said: Any = getattr(model, "inputs", None) or {"images": model.input_size}
    lengths = numpy.integers(4, TOKENS + 1, count)
    there = (np.arange(TOKENS) < lengths[:, None]).astype(np.int64)
    given: dict[str, NDArray[Any]] = {}
    for name, each in said.items():
        if isinstance(each, Tensor):
            given[name] = there if name.endswith("mask") else numpy.integers(1, WORDS, (count, TOKENS))
        elif len(each) == 3:
            coarse = torch.randn(count, each[0], 8, 8, generator=generator)
            fine = torch.randn(count, *each, generator=generator)
            given[name] = (F.interpolate(coarse, size=each[1:], mode="bilinear") + 0.1 * fine).numpy()
        else:
            given[name] = numpy.standard_normal((count, *each), dtype=np.float32)
    return given


@torch.no_grad()
def settle_(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Set the statistics of every batch norm to those of its inputs."""
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    if norms:
        model(*inputs.values())
    for norm in norms:
        norm.eval()


def _timm_class(kind: str) -> Small:
    name, kwargs, side = CLASSES[kind]

    def build() -> nn.Module:
        cls = _classes()[kind]
        sized = {"img_size": side} if "img_size" in inspect.signature(cls).parameters else {}
        arguments = {**kwargs, **sized, "num_classes": CLASSES_TOLD}
        model: nn.Module = timm.create_model(name, **arguments) if name else cls(**arguments)
        return model

    return Small(source="timm", kind=kind, name=name, build=build, side=side)


def _classes() -> Mapping[str, type[nn.Module]]:
    """Return all modules of timm by name."""
    files = [import_module(f"timm.models.{each}") for each in timm.list_modules()]
    return {
        name: each
        for file in files
        for name, each in vars(file).items()
        if isinstance(each, type) and issubclass(each, nn.Module) and each.__module__ == file.__name__
    }


TORCHVISION: Mapping[str, Callable[[Any], nn.Module]] = {
    "alexnet": lambda of: _headed(of.AlexNet(), 256 * 36),
    "convnext": lambda of: of.ConvNeXt(_blocks(of.convnext.CNBlockConfig), num_classes=CLASSES_TOLD),
    "densenet": lambda of: of.DenseNet(16, (2, 2, 2, 2), 32, num_classes=CLASSES_TOLD),
    "efficientnet": lambda of: of.efficientnet_b0(num_classes=CLASSES_TOLD),
    "googlenet": lambda of: of.GoogLeNet(CLASSES_TOLD, aux_logits=False, init_weights=False),
    "inception": lambda of: of.Inception3(CLASSES_TOLD, aux_logits=False, init_weights=False),
    "maxvit": lambda of: of.MaxVit((SIDE, SIDE), 32, 4, [32, 48], [1, 1], 16, 0.0, num_classes=CLASSES_TOLD),
    "mnasnet": lambda of: of.MNASNet(0.5, CLASSES_TOLD),
    "mobilenetv2": lambda of: of.MobileNetV2(CLASSES_TOLD, 0.5),
    "mobilenetv3": lambda of: of.mobilenet_v3_small(num_classes=CLASSES_TOLD),
    "regnet": lambda of: of.regnet_y_400mf(num_classes=CLASSES_TOLD),
    "resnet": lambda of: of.resnet18(num_classes=CLASSES_TOLD),
    "shufflenetv2": lambda of: of.shufflenet_v2_x0_5(num_classes=CLASSES_TOLD),
    "squeezenet": lambda of: of.squeezenet1_1(num_classes=CLASSES_TOLD),
    "swin_transformer": lambda of: of.SwinTransformer(
        *([4, 4], 32, [1, 2], [2, 4], [4, 4]),
        num_classes=CLASSES_TOLD,
        block=of.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=of.swin_transformer.PatchMergingV2,
    ),
    "vgg": lambda of: _headed(of.VGG(of.vgg.make_layers([32, "M", 48, "M", 64, "M"], batch_norm=True)), 64 * 49),
    "vision_transformer": lambda of: of.VisionTransformer(SIDE, 16, 2, 4, 64, 256, num_classes=CLASSES_TOLD),
}
"""A constructor for each file of torchvision's models."""
LARGER = {"inception": 96}
"""Sides of images that differ from SIDE."""


def _headed(model: nn.Module, features: int) -> nn.Module:
    """Replace the classifier by a narrower one."""
    model.classifier = nn.Sequential(nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, CLASSES_TOLD))
    return model


def _blocks(config: Any) -> list[Any]:
    return [config(32, 48, 1), config(48, 64, 1), config(64, None, 2)]


def _torchvision(file: str) -> Small:
    def build() -> nn.Module:
        return TORCHVISION[file](import_module("torchvision.models"))

    return Small(source="torchvision", kind=file, name=file, build=build, side=LARGER.get(file, SIDE))


class _Logits(nn.Module):
    """A classifier of transformers that returns only the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.model(pixel_values=images).logits
        return out


_SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 192,
}
_TOWER: Mapping[str, Any] = {**_SIZES, "image_size": SIDE, "patch_size": 16}
_TEXT: Mapping[str, Any] = {**_SIZES, "vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0}
_FOUR = {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 48, 64, 96]}
TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "Beit": _TOWER,
    "Bit": {"depths": [1, 1, 1, 1], "hidden_sizes": [128, 256, 384, 512], "embedding_size": 64},
    "ConvNextV2": {**_FOUR, "image_size": SIDE},
    "Cvt": {"embed_dim": [32, 48, 64], "num_heads": [1, 3, 4], "depth": [1, 2, 3]},
    "Data2VecVision": _TOWER,
    "DeiT": _TOWER,
    "Dinov2": _TOWER,
    "EfficientNet": {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640, "image_size": SIDE},
    "FocalNet": {"embed_dim": 32, "depths": [1, 1, 1, 1], "image_size": SIDE},
    "HGNetV2": {},
    "Hiera": {"embed_dim": 32, "depths": [1, 1, 1, 1], "image_size": [SIDE, SIDE]},
    "IJepa": _TOWER,
    "Levit": {"image_size": SIDE, "hidden_sizes": [32, 64, 96], "num_attention_heads": [2, 4, 6], "depths": [1, 1, 1]},
    "MobileNetV1": {"depth_multiplier": 0.5, "image_size": SIDE},
    "MobileNetV2": {"depth_multiplier": 0.5, "image_size": SIDE},
    "MobileViT": {"image_size": SIDE, "hidden_sizes": [48, 64, 80]},
    "PoolFormer": {**_FOUR},
    "Pvt": {"image_size": SIDE, "depths": [1, 1, 1, 1]},
    "PvtV2": {"image_size": SIDE, "depths": [1, 1, 1, 1]},
    "RegNet": {**_FOUR, "embedding_size": 32, "groups_width": 16},
    "ResNet": {**_FOUR, "embedding_size": 32},
    "Segformer": {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]},
    "Siglip": {"vision_config": _TOWER},
    "SwiftFormer": {"depths": [1, 1, 1, 1], "embed_dims": [24, 32, 48, 64], "image_size": SIDE},
    "Swinv2": {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": SIDE},
    "ViT": _TOWER,
    "ViTMSN": _TOWER,
}
"""Classifiers of images, with the arguments that make them small."""


class _States(nn.Module):
    """An encoder of texts that returns only the states of the tokens."""

    inputs = dict.fromkeys(("input_ids", "attention_mask"), torch.zeros(TOKENS, dtype=torch.int64))

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return out


TEXTS: Mapping[str, Mapping[str, Any]] = {
    "AlbertModel": {**_TEXT, "embedding_size": 32},
    "BertModel": _TEXT,
    "DebertaV2Model": {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    "DistilBertModel": {"vocab_size": WORDS, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 192},
    "ElectraModel": {**_TEXT, "embedding_size": 32},
    "ModernBertModel": {**_TEXT, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    "MPNetModel": _TEXT,
    "RobertaModel": {**_TEXT, "pad_token_id": 1},
    "T5EncoderModel": {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 2, "d_ff": 192},
}
"""Encoders of texts, with the arguments that make them small."""


def _transformers(kind: str, name: str, kwargs: Mapping[str, Any], output: Callable[[nn.Module], nn.Module]) -> Small:
    def build() -> nn.Module:
        cls = getattr(import_module("transformers"), name)
        return output(cls(cls.config_class(**kwargs)))

    return Small(source="transformers", kind=kind, name=name, build=build)


def smalls() -> Iterator[Small]:
    """Yield all small models."""
    yield from (Small(source="own", kind=name, name=name, build=build) for name, build in OWN.items())
    yield from map(_timm_class, CLASSES)
    yield from map(_torchvision, TORCHVISION)
    for kind, kwargs in TRANSFORMERS.items():
        yield _transformers(kind, f"{kind}ForImageClassification", {**kwargs, "num_labels": CLASSES_TOLD}, _Logits)
    for kind, kwargs in TEXTS.items():
        yield _transformers(kind, kind, kwargs, _States)
