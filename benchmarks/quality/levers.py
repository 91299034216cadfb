"""Every option on every kind of site: its error, or the reason why it does nothing.

    python -m benchmarks.quality.levers --output benchmarks/results/levers.json [--only KIND]

A small model for each kind, with structured random weights, is reduced by each option through the Python interface. A
cell has the relative error of the outputs on other images, or the message of the tool.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import corp_deploy
from benchmarks.harness import Bench, measures
from corp_deploy.families.given_module import architecture_of_code
from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.spec.trusted_code import Code, trusting_code
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, save
from ground.errors import BadInput

SIDE, CLASSES, COUNT = 32, 7, 96
_VIT: dict[str, Any] = {"img_size": SIDE, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
_CONVS: dict[str, Any] = {"img_size": SIDE, "layers": [1, 1, 1, 1], "channels": [16, 16, 32, 32], "stem_width": 16}
GROUPED = """
from benchmarks.quality.levers import Grouped

def make():
    return Grouped()
"""


class Grouped(nn.Module):
    """A classifier with one attention whose two heads share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size = (3, SIDE, SIDE)
        self.stem, self.norm = nn.Conv2d(3, 48, 8, 8), nn.LayerNorm(48)
        self.q, self.kv, self.proj = nn.Linear(48, 64), nn.Linear(48, 64), nn.Linear(64, 48)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).mT
        normed = self.norm(x)
        k, v = self.kv(normed).unsqueeze(1).chunk(2, dim=-1)
        q = self.q(normed).unflatten(-1, (2, 32)).transpose(1, 2)
        z = functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        out: Tensor = self.head((x + self.proj(z.transpose(1, 2).flatten(2))).mean(1))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model whose sites are of one kind if only the option `share` is given; `parts` are their names in reports."""

    architecture: Architecture
    share: str
    parts: frozenset[str]
    calibration: Mapping[str, Any] = field(default_factory=dict)


def _timm(name: str, share: str, *parts: str, calibration: Mapping[str, Any] | None = None, **kwargs: Any) -> Kind:
    architecture = Architecture(name=name, kwargs={**kwargs, "num_classes": CLASSES})
    return Kind(architecture=architecture, share=share, parts=frozenset(parts), calibration=calibration or {})


KINDS: Mapping[str, Kind] = {
    "channels": _timm("vit_tiny_patch16_224", "mlp", "mlp", **_VIT),
    "gated channels": _timm("vit_giant_patch14_dinov2", "mlp", "mlp", **_VIT, mlp_ratio=4.0),
    "heads": _timm("vit_tiny_patch16_224", "attn", "heads", "qk", "v", **_VIT),
    "rotary heads": _timm("vit_small_patch16_rope_224", "attn", "heads", "qk", "v", **_VIT),
    "grouped heads": Kind(
        architecture=architecture_of_code(Code(file="own.py", function="make", source=GROUPED), {}, Preprocessing()),
        share="attn",
        parts=frozenset(("heads", "qk", "v")),
    ),
    "convolutions": _timm("resnet18d", "conv", "convolutions", **_CONVS),
    "squeeze and excitation": _timm("seresnet18", "conv", "convolutions", **_CONVS),
    "residual streams": _timm("resnet18d", "residual", "streams", calibration={"residual": True}, **_CONVS),
}
Lever = Callable[["Room"], Any]


def _asking(**options: Any) -> Lever:
    """Return a reduction of half of the kind's sites with these options."""
    return lambda room: room.reduced({room.kind.share: 0.5, **options})


def _alone(**options: Any) -> Lever:
    return lambda room: room.reduced(options)


def _exported(precision: str) -> Lever:
    return lambda room: room.exported(precision)


LEVERS: Mapping[str, Lever] = {
    "`--preset none`": _asking(preset="none"),
    "`--preset corp`": lambda room: room.reduced(
        {room.kind.share: 0.5, "preset": "corp"}, {"attention_system": room.kind.share == "attn"}
    ),
    "`--preset grail`": _asking(preset="grail"),
    "`--preset fold`": _asking(preset="fold"),
    "`--preset grail-fold`": _asking(preset="grail-fold"),
    "`--preset best`": _asking(preset="best"),
    "`--preset thorough`": _alone(preset="thorough", macs=0.8),
    "`--macs`": _alone(macs=0.8),
    "`--params`": _alone(params=0.8),
    "`--latency`": _alone(latency=0.9, latency_tables="tables"),
    "`--within`": lambda room: room.reduced({"within": "error 0.5"}, calibration={"hold_out": 32}),
    "`--closed-loop asymmetric`": _asking(closed_loop="asymmetric"),
    "`--closed-loop symmetric`": _asking(closed_loop="symmetric"),
    "`--hold-out`": lambda room: room.reduced({room.kind.share: 0.5}, {"hold_out": 32}),
    "`--groups`": lambda room: room.reduced({room.kind.share: 0.5}, {"groups": "image"}),
    "`--polish layer`": _asking(polish="layer"),
    "`--rescale`": _asking(rescale=True),
    "`--sparse 2:4`": _asking(sparse="2:4"),
    "`--merge-tokens`": _asking(merge_tokens=3),
    "`--whole-heads`": _alone(whole_heads=0.5),
    "`--select heads=fold`": _alone(whole_heads=0.5, select={"heads": "fold"}),
    "`--heads square`": _asking(heads="square"),
    "`--rotate`": _asking(rotate=True),
    "INT8": _exported("int8"),
    "FP8": _exported("fp8"),
    "BF16": _exported("bf16"),
}


@torch.no_grad()
def _with_structure(model: nn.Module) -> nn.Module:
    """Make a quarter of each matrix's directions strong, so that channels are correlated."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(0.1 * noise)
            continue
        rows, columns = len(parameter), parameter[0].numel()
        rank = max(min(rows, columns) // 4, 1)
        mixed = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
        parameter.copy_(mixed.view_as(parameter) / (rank * columns) ** 0.5 + 0.05 * noise / columns**0.5)
    return model


@cache
def _images(count: int, seed: int) -> NDArray[np.float32]:
    coarse = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear").numpy()


class Room:
    """A kind's model, and the files that are made of it in the current directory."""

    kind: Kind

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        torch.manual_seed(0)  # _with_structure adds to biases, which some layers draw
        self.dense = _with_structure(dense_from_architecture(kind.architecture)).eval()
        save(Checkpoint(model=self.dense, architecture=kind.architecture, lineage={}), Path("dense"))
        self.count = 0

    def model(self, name: str) -> corp_deploy.Source:
        """Return a model directory, whose code is in this file."""
        return corp_deploy.Source(name, trust_code=True)

    def moments(self, **options: Any) -> str:
        name = f"moments-{'-'.join(map(str, options.values()))}.safetensors"
        if not Path(name).exists():
            corp_deploy.calibrate(self.model("dense"), _images(COUNT, 1), name, **self.kind.calibration, **options)
        return name

    def reduced(self, options: Mapping[str, Any], calibration: Mapping[str, Any] | None = None) -> float:
        """Return the error of the reduced model. Raises BadInput also for a reduction that changed nothing."""
        self.count += 1
        own = {"align": {"mlp": 8, "head": 8, "conv": 8}, **options}
        merging = {name: value for name, value in options.items() if name == "merge_tokens"}
        moments = self.moments(**calibration or {}, **merging)
        to = f"reduced-{self.count}"
        made = corp_deploy.reduce(self.model("dense"), moments, to, inputs=_images(COUNT, 1), **own)
        of_kind = [site for site in made.sites if site.part in self.kind.parts]
        if not of_kind or made.macs[1] >= made.macs[0]:
            raise BadInput("; ".join(made.notes) or "no site of this kind is reduced")
        return _error(made.model, self.dense)

    def exported(self, precision: str) -> float:
        """Return the largest error of the reduced model's graph against its torch model."""
        if not Path("half").exists():
            options: dict[str, Any] = {self.kind.share: 0.5, "align": {"mlp": 8, "head": 8, "conv": 8}}
            corp_deploy.reduce(self.model("dense"), self.moments(), "half", **options)
        graph, held_out = f"{precision}.onnx", _images(32, 2)
        inputs = _images(COUNT, 1) if precision in ("int8", "fp8") else None
        corp_deploy.export(self.model("half"), graph, precision=precision, inputs=inputs)
        parity = corp_deploy.verify(self.model("half"), graph, inputs=held_out, max_error=1.0)
        return max(float(link.measures.relative_error) for link in parity.links)


def _error(model: nn.Module, dense: nn.Module) -> float:
    images = torch.from_numpy(_images(64, 3))
    with torch.no_grad():
        given, wanted = model(images), dense(images)
    return float((given - wanted).norm() / wanted.norm())


def cells(kind: str, levers: Mapping[str, Lever] = LEVERS) -> Iterator[dict[str, Any]]:
    """Yield the cells of one kind, made in a temporary directory."""
    with tempfile.TemporaryDirectory() as directory, chdir(directory), trusting_code(True):
        room = Room(KINDS[kind])
        for name, lever in levers.items():
            cell: dict[str, Any] = {"kind": kind, "lever": name}
            try:
                yield {**cell, "error": lever(room)}
            except BadInput as error:
                yield {**cell, "reason": str(error)}


@measures("benchmarks/levers")
def main(bench: Bench) -> None:
    """Write all cells."""
    for kind in KINDS:
        wanted = {name: lever for name, lever in LEVERS.items() if bench.wanted({"kind": kind, "lever": name})}
        for row in cells(kind, wanted) if wanted else ():
            bench.record.put("rows", row, ("kind", "lever"))
            click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
