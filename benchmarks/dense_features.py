"""A backbone that is reduced under dense heads that stay as they are: a real DINOv2 ViT-S/14, after CORP's experiment.

    make real
    python -m benchmarks.dense_features --output benchmarks/results/dense_features.json

The backbone is reduced and exported with class and patch tokens as named outputs, the saliency head is exported apart;
its maps of held-out crops are those of graph behind graph. `verify` tells each output's errors link by link. A linear
head is trained on the dense model's tokens of self-made mosaics and reads the reduced model's as it is. A run goes on
where another stopped.
"""

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.real.bench import Bench, with_bench
from benchmarks.real.commands import run
from benchmarks.real.measures import BATCH, overlap, relative_error
from benchmarks.real.mosaics import class_maps, linear_head, mosaics
from benchmarks.real.rows import METHODS, Method, words
from benchmarks.real.subject import Calibration, Subject
from corp_deploy.families.family import output_ports, with_outputs
from corp_deploy.families.model_cost import macs, parameters
from corp_deploy.families.outputs import Outputs
from corp_deploy.proof.candidates import candidate_from_path, outputs_at
from corp_deploy.store.checkpoint import load_checkpoint
from export.graph.to_onnx import onnx_from_model, save
from ground.feeds import feeds_from_array
from ground.ports import OutputPort, Port
from perf.runners.onnx import OnnxRunner

KIND = "benchmarks/dense-features"
OUTPUTS = Outputs(("class", "patches"))
HEAD = "head.onnx"
SALIENCY = OutputPort(name="saliency", role="feature map")
NAMES = ("none", "corp", "best", "best, closed loop")
SHARE = 0.7
TOLD = ("relative_error", "cosine_mean", "token_cosine_mean", "token_cosine_q01", "neighbour_agreement", "linear_cka")


class Dense:
    """The dense backbone with its tokens, the saliency head's graph, and a linear head on mosaics."""

    def __init__(self, subject: Subject, count: int) -> None:
        self.subject = subject
        self.model = with_outputs(subject.model, OUTPUTS)
        self.patches_BNC = tokens(self.model, subject.held_out)
        self.maps_BSS = saliency(subject.head, self.patches_BNC)
        size = subject.held_out.shape[-1]
        how = {"size": size, "patch": subject.head.patch}
        trained, self.mosaics = (mosaics(count, seed=seed, **how) for seed in (1, 2))
        self.linear = linear_head(tokens(self.model, trained.images), trained.classes)
        self.classes_BN = class_maps(self.linear, tokens(self.model, self.mosaics.images))

    def export_head(self, path: Path) -> None:
        """The saliency head alone, of patch tokens."""
        port = Port(name="patches", shape=tuple(self.patches_BNC.shape[1:]))
        save(onnx_from_model(self.subject.head, [port], [SALIENCY], precision="fp32", metadata={}), path)


def tokens(model: nn.Module, images: Tensor) -> Tensor:
    """Patch tokens [B,N,C] of a model with OUTPUTS."""
    with torch.inference_mode():
        return torch.cat([model(part)[1] for part in images.split(BATCH)])


def saliency(head: nn.Module, patches_BNC: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([head(part) for part in patches_BNC.split(BATCH)])


def map_figures(step: str, maps_BSS: Tensor, dense: Dense) -> dict[str, Any]:
    """How far maps are from those of the dense model in torch."""
    return {
        "step": step,
        "map_error": relative_error(maps_BSS, dense.maps_BSS),
        "iou": overlap(maps_BSS, dense.maps_BSS),
    }


def maps_of_graphs(backbone: Path, head: Path, images: Tensor) -> Tensor:
    """What the backbone's graph and behind it the head's make of images; an FP16 graph computed as its types say."""
    step = candidate_from_path(backbone)
    ports = [OutputPort(name="class", role="embedding"), OutputPort(name="patches", role="feature map")]
    with step.opened(ports) as backbone_run, OnnxRunner(head) as head_run:
        maps = []
        for part in images.split(BATCH):
            patches = outputs_at(backbone_run, {"images": part.numpy()}, len(part))["patches"]
            maps.append(head_run(feeds_from_array(patches, head_run.inputs))["saliency"])
    return torch.from_numpy(np.concatenate(maps))


def linear_figures(model: nn.Module, dense: Dense) -> dict[str, float]:
    """The linear head's accuracy on patches of mosaics, dense and reduced, and how many patches keep their class."""
    told_BN = class_maps(dense.linear, tokens(model, dense.mosaics.images))
    share = {"dense_accuracy": dense.classes_BN, "accuracy": told_BN}
    accuracies = {name: float((maps == dense.mosaics.classes).double().mean()) for name, maps in share.items()}
    return accuracies | {"same_class": float((told_BN == dense.classes_BN).double().mean())}


def proven(subject: Subject, directory: Path) -> list[dict[str, Any]]:
    """The parity chain, a row for each link and output; what a reduction loses has no limit here, so no verdict."""
    held, parity = subject.work / "held.npy", subject.work / "parity.json"
    np.save(held, subject.held_out.numpy())
    steps = [str(directory), *(str(directory / name) for name in ("model.onnx", "model.fp16.onnx"))]
    given = ["--images", str(held), "--batch", str(BATCH), "--max-error", "10", "--output", str(parity)]
    named = ["--outputs", ",".join(OUTPUTS.names)]
    run(["verify", *subject.model_words[1:], *named, *steps, *given], subject.threads)
    links = json.loads(parity.read_text(encoding="utf-8"))["links"]
    return [
        {"link": link["name"], "kind": link["kind"], "output": link["output"]}
        | ({"status": link["status"]} if link["kind"] in ("exact", "half") else {})
        | {name: link["measures"][name] for name in TOLD if name in link["measures"]}
        for link in links
    ]


def row_of(method: Method, calibration: Calibration, dense: Dense) -> dict[str, Any]:
    """One method: reduced, exported, proven, and read by both heads."""
    subject, directory = dense.subject, dense.subject.work / "features"
    said = [*words(method, SHARE, subject.settings), "--outputs", ",".join(OUTPUTS.names)]
    cost = subject.reduced(said, method, calibration, directory)
    model = load_checkpoint(directory).model
    assert [port.name for port in output_ports(model)] == list(OUTPUTS.names), "the directory keeps its outputs"
    graph, fp16, head = (directory / name for name in ("model.onnx", "model.fp16.onnx", HEAD))
    run(["export", "--model", str(directory), "-o", str(graph), "--precision", "fp32,fp16"], subject.threads)
    dense.export_head(head)
    own = saliency(subject.head, tokens(model, subject.held_out))
    maps = {"reduced torch fp32": own}
    maps |= {path.name: maps_of_graphs(path, head, subject.held_out) for path in (graph, fp16)}
    return {
        "method": method.name,
        "share": SHARE,
        "command": f"reduce {' '.join(said)}",
        "macs_share": macs(model) / subject.macs,
        "parameters": parameters(model),
        "cpu_s": cost.cpu_s,
        "links": proven(subject, directory),
        "saliency": [map_figures(step, each, dense) for step, each in maps.items()],
        "linear": linear_figures(model, dense),
    }


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
        torch_maps = row["saliency"][0]
        click.echo(f"{method.name}: map error {torch_maps['map_error']:.3f}, IoU {torch_maps['iou']:.3f}")


if __name__ == "__main__":
    main()
