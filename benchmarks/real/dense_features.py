"""A backbone that is reduced under dense heads that stay as they are: a real DINOv2 ViT-S/14, after CORP's experiment.

    make real
    python -m benchmarks.real.dense_features --output benchmarks/results/dense_features.json

The backbone is reduced and exported with class and patch tokens as named outputs, the saliency head is exported apart;
`verify --head` tells each output's errors and those of the head's maps of held-out crops link by link. A linear head is
trained on the dense model's tokens of self-made mosaics and reads the reduced model's as it is, `verify` telling its
maps of others likewise. A run goes on where another stopped.
"""

import json
from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.real.bench import Bench, with_bench
from benchmarks.real.commands import run
from benchmarks.real.measures import BATCH
from benchmarks.real.mosaics import class_maps, linear_head, mosaics
from benchmarks.real.rows import METHODS, Method, words
from benchmarks.real.subject import Calibration, Subject
from corp_deploy.families.counting import macs, parameters
from corp_deploy.families.family import output_ports, with_outputs
from corp_deploy.spec.outputs import Outputs
from corp_deploy.store.checkpoint import load_checkpoint
from export.graph.to_onnx import onnx_from_model, save
from ground.ports import OutputPort, Port

KIND = "benchmarks/dense-features"
OUTPUTS = Outputs(("class", "patches"))
SALIENCY, TEXTURES = "saliency", "textures"
NAMES = ("none", "corp", "best", "best, closed loop")
SHARE = 0.7
TOLD = (
    *("relative_error", "cosine_mean", "token_cosine_mean", "token_cosine_q01", "neighbour_agreement", "linear_cka"),
    *("relative_error_mean", "relative_error_worst", "iou", "iou_worst", "pixel_agreement"),
)


class Dense:
    """The dense backbone, and both heads: that of saliency, and a linear one trained on mosaics."""

    def __init__(self, subject: Subject, count: int) -> None:
        self.subject = subject
        self.model = with_outputs(subject.model, OUTPUTS)
        size = subject.held_out.shape[-1]
        how = {"size": size, "patch": subject.head.patch}
        trained, self.mosaics = (mosaics(count, seed=seed, **how) for seed in (1, 2))
        self.linear = linear_head(tokens(self.model, trained.images), trained.classes)
        self.classes_BN = class_maps(self.linear, tokens(self.model, self.mosaics.images))

    def export_head(self, name: str) -> Path:
        """A head alone, of patch tokens; its file says what its map is called."""
        head = self.subject.head if name == SALIENCY else LinearHead(self.linear)
        port, path = Port(name="patches", shape=self.patches), self.subject.work / f"{name}.onnx"
        outputs = [OutputPort(name=name, role="score map")]
        save(onnx_from_model(head, [port], outputs, precision="fp32", metadata={}), path)
        return path

    @property
    def patches(self) -> tuple[int, ...]:
        """The shape of an image's patch tokens."""
        return self.mosaics.classes.shape[1], self.linear.in_features


class LinearHead(nn.Module):
    """Patch tokens [B,N,C] to scores of classes at each place [B,K,H,W], N a square."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, patches: Tensor) -> Tensor:
        grid = isqrt(patches.shape[1])
        maps: Tensor = self.linear(patches).transpose(1, 2).unflatten(2, (grid, grid))
        return maps


def tokens(model: nn.Module, images: Tensor) -> Tensor:
    """Patch tokens [B,N,C] of a model with OUTPUTS."""
    with torch.inference_mode():
        return torch.cat([model(part)[1] for part in images.split(BATCH)])


def linear_figures(model: nn.Module, dense: Dense) -> dict[str, float]:
    """The linear head's accuracy on patches of mosaics, dense and reduced."""
    told_BN = class_maps(dense.linear, tokens(model, dense.mosaics.images))
    share = {"dense_accuracy": dense.classes_BN, "accuracy": told_BN}
    return {name: float((maps == dense.mosaics.classes).double().mean()) for name, maps in share.items()}


def proven(subject: Subject, directory: Path, images: Tensor, head: Path) -> list[dict[str, Any]]:
    """The parity chain on these images, a row for each link and output; what a reduction loses has no limit here, so no
    verdict.
    """
    held, parity = subject.work / "held.npy", subject.work / "parity.json"
    np.save(held, images.numpy())
    steps = [str(directory), *(str(directory / name) for name in ("model.onnx", "model.fp16.onnx"))]
    given = ["--images", str(held), "--batch", str(BATCH), "--max-error", "10", "--output", str(parity)]
    named = ["--outputs", ",".join(OUTPUTS.names), "--head", str(head)]
    run(["verify", *subject.model_words[1:], *named, *steps, *given], subject.threads)
    links = json.loads(parity.read_text(encoding="utf-8"))["links"]
    return [
        {"link": link["name"], "kind": link["kind"], "output": link["output"]}
        | ({"status": link["status"]} if link["kind"] in ("exact", "half") else {})
        | {name: link["measures"][name] for name in TOLD if name in link["measures"]}
        for link in links
    ]


def row_of(method: Method, calibration: Calibration, dense: Dense) -> dict[str, Any]:
    """One method: reduced, exported, and proven with both heads."""
    subject, directory = dense.subject, dense.subject.work / "features"
    said = [*words(method, SHARE, subject.settings), "--outputs", ",".join(OUTPUTS.names)]
    cost = subject.reduced(said, method, calibration, directory)
    model = load_checkpoint(directory).model
    assert [port.name for port in output_ports(model)] == list(OUTPUTS.names), "the directory keeps its outputs"
    graph = directory / "model.onnx"
    run(["export", "--model", str(directory), "-o", str(graph), "--precision", "fp32,fp16"], subject.threads)
    of_mosaics = proven(subject, directory, dense.mosaics.images, dense.export_head(TEXTURES))
    return {
        "method": method.name,
        "share": SHARE,
        "command": f"reduce {' '.join(said)}",
        "macs_share": macs(model) / subject.macs,
        "parameters": parameters(model),
        "cpu_s": cost.cpu_s,
        "links": proven(subject, directory, subject.held_out, dense.export_head(SALIENCY)),
        "links_of_mosaics": [link for link in of_mosaics if link["output"] == TEXTURES],
        "linear": linear_figures(model, dense),
    }


def link_of(links: Sequence[Mapping[str, Any]], kind: str, output: str) -> Mapping[str, Any]:
    """The link of this kind at this output."""
    return next(link for link in links if (link["kind"], link["output"]) == (kind, output))


@click.command(help=__doc__)
@click.option(
    "--mosaics", "count", type=click.IntRange(2), default=64, show_default=True, help="To train on, and test."
)
@with_bench
def main(bench: Bench, *, count: int) -> None:
    record, dense = bench.record(KIND, mosaics=count), Dense(bench.subject, count)
    for method in (each for each in METHODS if each.name in NAMES and bench.wanted(each.name)):
        if record.has("rows", {"method": method.name}) and not bench.again:
            continue
        row = row_of(method, bench.calibration, dense)
        record.put("rows", row, ("method",))
        maps = link_of(row["links"], "reduced", SALIENCY)
        click.echo(f"{method.name}: map error {maps['relative_error']:.3f}, IoU {maps['iou']:.3f}")


if __name__ == "__main__":
    main()
