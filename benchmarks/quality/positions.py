"""Positions of merged tokens: quality on two rotary ViTs trained on the digits, and graphs of models of real size.

    python -m benchmarks.quality.positions --output benchmarks/results/positions.json

The first has no positions but rotary ones, the second learned ones too. They are trained first where their weights are
not in the cache, each for about five minutes on one idle CPU core. A merged token is turned by the mean of the sines
and cosines of its sources, by that mean scaled to the root of its length or to length one, or by the sine and cosine of
the sources' mean angle, which is that of their mean place. Beside them stand narrower widths of the same
multiply-adds. Errors are of the logits on 500 held-out digits.

Models of real size have random weights: they show multiply-adds, graphs and engines, and nothing of quality.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
import onnxruntime as ort
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn

from benchmarks.harness import Bench, measures
from calib.images import Images
from corp_deploy.families.counting import macs
from corp_deploy.families.traced_model import depth, input_spec, token_kinds, with_merging
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.plan import make_plan
from corp_deploy.planning.request import build_request
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import Merging
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.module import tracing
from corp_deploy.traced.models.position_means import count_macs_of_means, scaled_turn
from examples.digits.images import load_part
from examples.digits.train import train
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.errors import Missing

DEPTH = 6
KWARGS = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": DEPTH, "num_heads": 3, "num_classes": 10}
MODELS = tuple(
    Architecture(name=name, kwargs=KWARGS) for name in ("vit_small_patch16_rope_224", "eva02_tiny_patch14_224")
)
EPOCHS, RATE, SIDE, CALIBRATION_IMAGES = 16, 1e-3, 8, 512
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
    """Take angles that are continuous along the rows and columns of the grid of patches."""
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
    """Return a trained model, trained first where the cache lacks its weights."""
    path, model = cache / f"digits-{architecture.name}.safetensors", dense_from_architecture(architecture)
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        state = train(lambda: dense_from_architecture(architecture), epochs=EPOCHS, rate=RATE).state_dict()
        save_file({name: each.contiguous() for name, each in state.items()}, path)
    model.load_state_dict(load_file(path))
    return Checkpoint(model=model.eval(), architecture=architecture, lineage={})


def figures(dense: nn.Module, model: nn.Module) -> dict[str, Any]:
    """Return relative error of the logits, agreement and accuracy on the held-out digits."""
    held_out = load_part("held-out")
    with torch.inference_mode():
        expected, got = (each(torch.from_numpy(held_out.images)) for each in (dense, model))
    return {
        "error": float((got - expected).norm() / expected.norm()),
        "agreement": float((got.argmax(1) == expected.argmax(1)).float().mean()),
        "accuracy": float((got.argmax(1).numpy() == held_out.labels).mean()),
    }


def merged_row(dense: Checkpoint, merged: nn.Module, turn: Turn) -> dict[str, Any]:
    return figures(dense.model, turned(merged, turn)) | {"macs_share": macs(merged) / macs(dense.model)}


def repaired_row(dense: Checkpoint, merged: nn.Module, images: Images) -> dict[str, Any]:
    full = method_from_preset("best", mlp_sparsity=0.0, attention_sparsity=0.0)
    model = reduce_traced(merged, images, full, loop=Loop()).model
    return figures(dense.model, model) | {"macs_share": macs(model) / macs(dense.model)}


def narrower_row(dense: Checkpoint, merged: nn.Module, images: Images) -> dict[str, Any]:
    """Reduce widths to the multiply-adds of the merged model."""
    moments = calibrate(dense, images, batch_size=64)
    request = build_request(ReduceOptions(preset="best", macs=macs(merged) / macs(dense.model)))
    plan = make_plan(dense, moments, request, images)
    model = reduce_traced(dense.model, images, request.method, widths=plan.widths, loop=Loop()).model
    return figures(dense.model, model) | {"macs_share": macs(model) / macs(dense.model)}


def answers(path: Path, images: Tensor) -> Tensor:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = [{session.get_inputs()[0].name: each.numpy()} for each in images.split(2)]
    return torch.cat([torch.from_numpy(session.run(None, feed)[0]) for feed in feeds])


def fused(path: Path) -> dict[str, int | None]:
    """Return the number of attentions and of those that TensorRT-RTX fuses, None where it is not installed."""
    options = BuildOptions(backend="tensorrt-rtx", sms=(SM,), profiles=(BatchProfile.from_text("1:8:16"),))
    try:
        record = build_engine(path, options).record
    except Missing:
        return {"attentions": None, "fused_attention": None}
    return {"attentions": len(record.attention_sites), "fused_attention": record.fused_attention}


def shape_row(name: str, scratch: Path) -> dict[str, Any]:
    """Merge tokens of a model with random weights, and compare its graph with torch on noise.

    A row counts inputs of which graph and torch merge other tokens; the largest error is that of the others.
    """
    torch.manual_seed(0)
    architecture = Architecture(name=name)
    dense = dense_from_architecture(architecture)
    tokens, blocks = len(token_kinds(dense)), depth(dense)
    count = round(TOKENS_MERGED * tokens)
    model = with_merging(dense, Merging(schedule=(count,) * blocks))
    for precision in ("fp32", "fp16"):
        whole = Checkpoint(model=model, architecture=architecture, lineage={})
        export_checkpoint(whole, scratch / f"{precision}.onnx", precision=precision)
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


def measure(bench: Bench, dense: Checkpoint, scratch: Path) -> None:
    """Make the rows of one trained model."""
    own = {"model": dense.architecture.name}
    key = {**own, "merged": 0, "way": "dense"}
    bench.row(key, lambda: figures(dense.model, dense.model) | {"macs_share": 1.0})
    images = images_for_model(dense.model, scratch / "calibration.npy")
    for count in SCHEDULES:
        merged = with_merging(dense.model, Merging(schedule=(count,) * DEPTH))
        for turn in TURNS:
            bench.row({**own, "merged": count, "way": turn}, merged_row, dense, merged, turn)
        bench.row({**own, "merged": count, "way": "closed loop"}, repaired_row, dense, merged, images)
        bench.row({**own, "merged": count, "way": "widths"}, narrower_row, dense, merged, images)


@measures("benchmarks/positions")
@click.option("--cache", type=click.Path(path_type=Path), default=Path("build/models"), show_default=True)
def main(bench: Bench, cache: Path) -> None:
    """Measure ways to turn merged tokens, and widths at equal multiply-adds, then graphs of models of real size."""
    bench.share(epochs=EPOCHS, calibration_images=CALIBRATION_IMAGES)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        np.save(scratch / "calibration.npy", load_part("train").images[:CALIBRATION_IMAGES])
        for architecture in MODELS:
            measure(bench, trained(architecture, cache), scratch)
        for name in SHAPES:
            bench.row({"shape": name}, shape_row, name, scratch, part="shapes")


if __name__ == "__main__":
    main()
