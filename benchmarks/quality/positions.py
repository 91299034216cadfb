"""Positions of merged tokens: errors on two rotary ViTs trained on the digits, and graphs of models of real size.

    python -m benchmarks.quality.positions --output benchmarks/results/positions.json

One ViT has only rotary positions, the other learned ones too. Each is trained first if the cache lacks its weights, for
about five minutes on one idle CPU core. A merged token is turned by the mean of the sines and cosines of its sources,
by this mean scaled to the root of its length or to length one, or by the sine and cosine of the sources' mean angle,
which is that of their mean place. They are compared with narrower widths of the same multiply-adds. Errors are of the
logits on 500 held-out digits.

Models of real size have random weights: they show multiply-adds, graphs and engines, not quality.
"""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
import onnxruntime as ort
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import Subject, digits
from benchmarks.quality.ways import Way, widths_by_site
from benchmarks.speed.random_models import build_rtx, random_checkpoint
from corp_deploy.families.counting import macs
from corp_deploy.families.traced_model import depth, input_spec, token_kinds, with_merging
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.request import build_request
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import Merging
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.module import tracing
from corp_deploy.traced.models.position_means import count_macs_of_means, scaled_turn
from examples.digits.train import train
from ground.errors import Missing

DEPTH = 6
KWARGS = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": DEPTH, "num_heads": 3, "num_classes": 10}
MODELS = tuple(
    Architecture(name=name, kwargs=KWARGS) for name in ("vit_small_patch16_rope_224", "eva02_tiny_patch14_224")
)
EPOCHS, RATE, SIDE, CALIBRATION_IMAGES, HELD_OUT = 16, 1e-3, 8, 512, 500
SCHEDULES = (2, 4, 6, 8)
Turn = Literal["root of the mean's length", "mean", "mean of length one", "mean angle"]
TURNS: tuple[Turn, ...] = ("root of the mean's length", "mean", "mean of length one", "mean angle")
SHAPES = ("vit_small_patch16_dinov3", "eva02_small_patch14_336", "beit_base_patch16_224")
TOKENS_MERGED, APART, SM = 0.04, 1e-3, "89"


def _at_length_one(sin_MD: Tensor, cos_MD: Tensor, shares_BNM: Tensor, of: int) -> Tensor:
    both = shares_BNM @ sin_MD, shares_BNM @ cos_MD
    length_BND = (both[0].square() + both[1].square()).sqrt().clamp_min(1e-12)
    return (both[of] / length_BND).unsqueeze(1)


def _at_mean_angle(sin_MD: Tensor, cos_MD: Tensor, shares_BNM: Tensor, of: int) -> Tensor:
    """Return a sine or cosine of the mean angle, of angles that are continuous along the grid of patches."""
    grid_HWD = torch.atan2(sin_MD, cos_MD).reshape(SIDE, SIDE, -1).numpy()
    angles_MD = torch.from_numpy(np.unwrap(np.unwrap(grid_HWD, axis=1), axis=0)).flatten(0, 1)
    angles_BHND = (shares_BNM @ angles_MD.float()).unsqueeze(1)
    return (angles_BHND.sin(), angles_BHND.cos())[of]


def turned(model: nn.Module, turn: Turn) -> nn.Module:
    """Return the program of a merged model that turns merged tokens in this way."""
    program = tracing(model).running
    graph = fx.GraphModule(program.graph, copy.deepcopy(program.graph.graph))
    ways = {"mean of length one": _at_length_one, "mean angle": _at_mean_angle}
    nodes: list[Any] = [node for node in graph.graph.nodes if node.target is scaled_turn]
    for node in nodes if turn != "root of the mean's length" else ():
        means = node.args
        names = [str(mean.args[0].args[0].target) for mean in means]
        averages = [float(program.tensor(name).mean()) for name in names]  # the cosines have the larger one
        sin, cos = sorted(names, key=lambda name: averages[names.index(name)])
        with graph.graph.inserting_before(node):
            if turn == "mean":
                instead = means[0]
            else:
                read = graph.graph.get_attr(sin), graph.graph.get_attr(cos), means[0].args[1], int(names[0] == cos)
                instead = graph.graph.call_function(ways[turn], read)
            node.replace_all_uses_with(instead)
    graph.recompile()
    return graph


def trained(architecture: Architecture, cache: Path) -> Checkpoint:
    """Return a trained model, trained first if the cache lacks its weights."""
    path, model = cache / f"digits-{architecture.name}.safetensors", dense_from_architecture(architecture)
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        state = train(lambda: dense_from_architecture(architecture), epochs=EPOCHS, rate=RATE).state_dict()
        save_file({name: each.contiguous() for name, each in state.items()}, path)
    model.load_state_dict(load_file(path))
    return Checkpoint(model=model.eval(), architecture=architecture, lineage={})


def figures(subject: Subject, model: nn.Module, sized: nn.Module) -> dict[str, Any]:
    """Return errors on the held-out digits, and the share of the MACs of the model `sized`."""
    found = subject.figures(model)
    share = macs(sized) / macs(subject.dense.model)
    return {"error": found.pop("relative_error"), **found, "macs_share": share}


def merged_row(subject: Subject, merged: nn.Module, turn: Turn) -> dict[str, Any]:
    """Judge a model with merged tokens that are turned in this way."""
    return figures(subject, turned(merged, turn), merged)


def repaired_row(subject: Subject, merged: nn.Module) -> dict[str, Any]:
    """Repair a model with merged tokens at full widths, and judge it."""
    full = method_from_preset("best", mlp_sparsity=0.0, attention_sparsity=0.0)
    model = reduce_traced(merged, subject.inputs, full, loop=Loop()).model
    return figures(subject, model, model)


def narrower_row(subject: Subject, merged: nn.Module) -> dict[str, Any]:
    """Reduce widths to the multiply-adds of the merged model, and judge."""
    method = build_request(ReduceOptions(preset="best", macs=1.0)).method
    widths = widths_by_site(subject, method, macs(merged) / macs(subject.dense.model))
    model = Way("widths", loop=Loop()).reduced(subject, method, widths)
    return figures(subject, model, model)


def answers(path: Path, images: Tensor) -> Tensor:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = [{session.get_inputs()[0].name: each.numpy()} for each in images.split(2)]
    return torch.cat([torch.from_numpy(session.run(None, feed)[0]) for feed in feeds])


def fused(path: Path) -> dict[str, int | None]:
    """Return the number of attentions and of those that TensorRT-RTX fuses, None if it is not installed."""
    try:
        record = build_rtx(path, SM, "1:8:16")
    except Missing:
        return {"attentions": None, "fused_attention": None}
    return {"attentions": len(record.attention_sites), "fused_attention": record.fused_attention}


def shape_row(name: str, scratch: Path) -> dict[str, Any]:
    """Merge tokens of a model with random weights, and compare its graph with torch on noise.

    The row counts inputs whose tokens graph and torch merge differently; the largest error is that of the others.
    """
    checkpoint = random_checkpoint(name)
    dense = checkpoint.model
    tokens, blocks = len(token_kinds(dense)), depth(dense)
    count = round(TOKENS_MERGED * tokens)
    model = with_merging(dense, Merging(schedule=(count,) * blocks))
    for precision in ("fp32", "fp16"):
        export_checkpoint(replace(checkpoint, model=model), scratch / f"{precision}.onnx", precision=precision)
    images = torch.randn(8, *input_spec(model).ports[0].shape)
    with torch.inference_mode():
        expected = model(images)
    lost_B = (answers(scratch / "fp32.onnx", images) - expected).norm(dim=1) / expected.norm(dim=1)
    return {
        "merged": count,
        "tokens": tokens,
        "tokens_left": tokens - blocks * count,
        "macs_share": macs(model) / macs(dense),
        "positions_share": count_macs_of_means(tracing(model).running) / macs(model),
        "graph_error": float(lost_B[lost_B < APART].max()),
        "images_apart": int((lost_B >= APART).sum()),
        **fused(scratch / "fp16.onnx"),
    }


def measure(bench: Bench, subject: Subject) -> None:
    """Make the rows of one trained model."""
    dense = subject.dense
    own = {"model": dense.architecture.name}
    bench.row({**own, "merged": 0, "way": "dense"}, figures, subject, dense.model, dense.model)
    for count in SCHEDULES:
        merged = with_merging(dense.model, Merging(schedule=(count,) * DEPTH))
        for turn in TURNS:
            bench.row({**own, "merged": count, "way": turn}, merged_row, subject, merged, turn)
        bench.row({**own, "merged": count, "way": "closed loop"}, repaired_row, subject, merged)
        bench.row({**own, "merged": count, "way": "widths"}, narrower_row, subject, merged)


@measures("benchmarks/positions")
@click.option("--cache", type=click.Path(path_type=Path), default=Path("build/models"), show_default=True)
def main(bench: Bench, cache: Path) -> None:
    """Measure ways to turn merged tokens, and widths at equal multiply-adds, then graphs of models of real size."""
    bench.share(epochs=EPOCHS, calibration_images=CALIBRATION_IMAGES)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        for architecture in MODELS:
            measure(bench, digits(scratch, CALIBRATION_IMAGES, HELD_OUT, trained(architecture, cache)))
        for name in SHAPES:
            bench.row({"shape": name}, shape_row, name, scratch, part="shapes")


if __name__ == "__main__":
    main()
