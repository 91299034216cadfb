"""Models with k:n sparse layers: refits, channel orders, directories, the command and exported graphs."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from calib.images import Images
from calib.store import save_moments
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.method_choice import sparsities_from_text
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.sparse_places import LayerSparsity, SparsityReport
from corp_deploy.reduction.sparsify import Sparsifying, sparsify
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import Merging
from corp_deploy.spec.sparsity import Sparsity
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.store.quantised_onnx import Quantisation, export_quantised, quantiser_of
from corp_deploy.traced.models.layers import build_layered_model
from corp_deploy.traced.models.module import replace_submodules
from ground.files import sha256_of_file
from tests import small_convnets, tiny
from tests.command import invoked, refuses
from tests.refusals import rejects
from tests.traced_examples import DENSENET, PVT, checkpoint_of
from tests.traced_examples import images as traced_images

TWO_OF_FOUR = Sparsity(kept=2, of=4)
ALL: Any = dict.fromkeys(("mlp", "head", "conv"), TWO_OF_FOUR)


@cache
def images() -> Images:
    return tiny.opened(Path(small_convnets._FOLDER.name) / "sparse.npy", tiny.images(48))


@cache
def sparsified(permute: Any = "none", target: Any = "reduced") -> tuple[nn.Module, SparsityReport]:
    return sparsify(tiny.checkpoint().model, images(), Sparsifying(kinds=ALL, permute=permute, target=target))


def nonzeros(weight: Tensor) -> Tensor:
    """Count the non-zeros of every four neighbours along the inputs."""
    weight = weight.movedim(1, -1)
    return (weight.reshape(*weight.shape[:-1], -1, 4) != 0).sum(-1)


def weight_of(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(f"{name}.weight").detach()


def record_layer(model: nn.Module, layer: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Record a layer's inputs and outputs in float64."""
    found: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda _, inputs, y: found.append((inputs[0].double(), y.double())))
    with torch.inference_mode():
        model(batch)
    handle.remove()
    return found[0]


def test_every_layer_of_the_sites_is_sparse_and_refitted() -> None:
    """Kept weights satisfy the normal equations on the sparse model's inputs and the dense model's outputs."""
    model, report = sparsified("none")
    dense, batch = tiny.checkpoint().model, torch.from_numpy(tiny.images(48))
    program, layers = build_layered_model(model)
    paths = {each.name: each.path for each in layers}
    names = [each.layer for each in report.layers]
    assert names == [f"blocks.{at}.{name}" for at in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    for each in report.layers:
        layer, own = program.get_submodule(paths[each.layer]), dense.get_submodule(each.layer)
        assert_refitted(each, layer, own, program, dense, batch)
        assert each.macs == 17 * weight_of(model, each.layer).numel(), each


def assert_refitted(
    each: LayerSparsity, layer: Any, own: Any, model: nn.Module, dense: nn.Module, batch: Tensor
) -> None:
    """Require that `layer` of the sparse model is 2:4 and refitted to the outputs of `own` of the dense model."""
    assert int(nonzeros(layer.weight).max()) == 2, each.layer
    assert (each.pattern, each.reason) == ("2:4", "")
    assert each.error <= each.error_masked, each
    assert each.macs_of_zeros == each.macs // 2, each
    (x, y), (_, t) = record_layer(model, layer, batch), record_layer(dense, own, batch)
    if isinstance(layer, nn.Conv2d):
        how: Any = {name: getattr(layer, name) for name in ("kernel_size", "dilation", "padding", "stride")}
        x, y, t = (part.flatten(2).transpose(1, 2) for part in (functional.unfold(x, **how), y, t))
    x, left, weight = x.flatten(0, -2), (y - t).flatten(0, -2), layer.weight.detach().flatten(1)
    error = float(left.square().sum() / len(left))
    assert error == pytest.approx(each.error, rel=1e-3, abs=1e-6 * each.energy)
    ridge = 1e-4 * float((x - x.mean(0)).square().mean(0).mean())
    gradient = left.T @ x / len(x) + ridge * (weight - own.weight.detach().flatten(1)).double()
    assert float((gradient * (weight != 0)).abs().max()) < 1e-5 * float((t.flatten(0, -2).T @ x / len(x)).abs().max())


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("architecture", "sparse"), [(PVT, 10), (DENSENET, 9)])
def test_layers_of_a_convolutional_model_are_refitted(architecture: Architecture, sparse: int) -> None:
    """A layer's kind is that of the sites which it writes or reads."""
    dense, pixels = checkpoint_of(architecture).model, traced_images(48, seed=1)
    source = tiny.opened(Path(small_convnets._FOLDER.name) / "traced.npy", pixels, dense)
    model, report = sparsify(dense, source, Sparsifying(kinds=ALL))
    program, layers = build_layered_model(model)
    paths = {each.name: each.path for each in layers}
    assert len(report.patterns) == sparse
    for each in report.layers:
        part = "head" if ".attn." in each.layer else "mlp" if ".mlp." in each.layer else "conv"
        assert each.kind == part, each
        if each.pattern:
            layer, own = program.get_submodule(paths[each.layer]), dense.get_submodule(each.layer)
            assert torch.equal(weight_of(model, each.layer), weight_of(program, paths[each.layer]))
            assert_refitted(each, layer, own, program, dense, torch.from_numpy(pixels))
        else:
            assert each.reason == "it sums over 3 channels, fewer than 4"
    permutes: tuple[Any, ...] = ("inside", "stream") if architecture is PVT else ("inside",)
    for permute in permutes:
        other, reordered = sparsify(dense, source, Sparsifying(kinds=ALL, permute=permute))
        for each in reordered.layers:
            assert not each.pattern or int(nonzeros(weight_of(other, each.layer)).max()) == 2, (permute, each)
        assert any(each.reordered for each in reordered.layers) == (architecture is PVT)
        errors = [small_convnets.error(each, dense, torch.from_numpy(pixels)) for each in (other, model)]
        assert errors[0] < 1.3 * errors[1]


def test_targets_of_the_reduced_model_lose_less_than_dense_ones() -> None:
    dense, unseen = tiny.checkpoint().model, torch.from_numpy(tiny.images(64, seed=5))
    errors = [small_convnets.error(sparsified("none", target)[0], dense, unseen) for target in ("reduced", "own")]
    assert errors[0] < errors[1] < 0.6


@pytest.mark.parametrize(("permute", "layers"), [("stream", None), ("inside", ("attn.proj", "mlp.fc2"))])
def test_channel_orders_are_reported(permute: str, layers: tuple[str, ...] | None) -> None:
    """`stream` may reorder the stream's channels too; `inside` reorders those inside sites alone."""
    model, report = sparsified(permute)
    dense, unseen = tiny.checkpoint().model, torch.from_numpy(tiny.images(64, seed=5))
    assert report.permute == permute
    reordered = [each.layer for each in report.layers if each.reordered]
    assert layers is None or reordered == [f"blocks.{at}.{name}" for at in (0, 1) for name in layers]
    assert small_convnets.error(model, dense, unseen) < 1.2 * small_convnets.error(sparsified("none")[0], dense, unseen)


def test_equal_groups_share_one_order() -> None:
    mixed: Any = {"mlp": TWO_OF_FOUR, "head": Sparsity(kept=4, of=8)}
    message = "one order of 48 channels can't serve groups of 4 and 8"
    rejects(message, sparsify, tiny.checkpoint().model, images(), Sparsifying(kinds=mixed, permute="stream"))


@pytest.mark.parametrize("name", ["resnext50_32x4d", "small_mobilenetv4"])
def test_convolutions_are_sparse_along_channels_at_each_tap(name: str) -> None:
    own, source = small_convnets.checkpoint(name), small_convnets.images_of(name, 48)
    model, report = sparsify(own.model, source, Sparsifying(kinds=ALL))
    assert report.patterns
    theirs, unseen = small_convnets.library(name), small_convnets.pixels(16, seed=5)
    for each in report.layers:
        weight = weight_of(model, each.layer)
        if each.pattern:
            assert int(nonzeros(weight).max()) <= 2, each.layer
            assert each.error <= each.error_masked, each
            _, y = record_layer(theirs, theirs.get_submodule(each.layer), unseen)
            assert each.macs == y[0, 0].numel() * weight.numel(), each
        else:
            assert each.reason, each
            assert torch.equal(weight, weight_of(own.model, each.layer))
    assert small_convnets.error(model, own.model, unseen) < 0.9
    assert all(weight_of(model, each.layer).shape[1] > 1 for each in report.layers), "depthwise ones sum over none"


def test_nonfinite_activations_are_refused() -> None:
    own = replace_submodules(tiny.checkpoint().model, {})
    with torch.no_grad():
        own.get_parameter("blocks.0.mlp.fc1.bias")[3] = float("inf")
    rejects(r"NaN or Inf in the activations", sparsify, own, images(), Sparsifying(kinds=ALL))


def test_merged_tokens_are_weighted_by_size_in_the_sparse_refit() -> None:
    own = tiny.checkpoint().model
    merging = Merging(schedule=(2, 2), metric="ward", how="merge", unmerged=False)
    merged = traced_model.with_merging(own, merging)
    new, report = sparsify(merged, images(), Sparsifying(kinds=ALL, permute="none"))
    assert traced_model.merging_of(new) == merging
    assert {each.macs for each in report.layers if each.layer.endswith("mlp.fc1")} == {17 * 48 * 192}
    assert (report.target, len(report.patterns)) == ("own", 8)
    assert all(each.error <= each.error_masked for each in report.layers)


def test_unsparsifiable_layer_is_kept_with_a_reason() -> None:
    own = tiny.checkpoint(embed_dim=54, num_heads=3)
    source = tiny.opened(Path(small_convnets._FOLDER.name) / "narrow.npy", tiny.images(24), own.model)
    model, report = sparsify(own.model, source, Sparsifying(kinds=ALL))
    assert list(report.patterns) == ["blocks.0.mlp.fc2", "blocks.1.mlp.fc2"]
    left = {each.layer: each.reason for each in report.layers if each.reason}
    assert set(left.values()) == {"it sums over 54 inputs, no multiple of 4"}
    assert torch.equal(weight_of(model, "blocks.0.attn.qkv"), weight_of(own.model, "blocks.0.attn.qkv"))
    message = r"--sparse head=2:4: no layer can be sparse.*54 inputs"
    rejects(message, sparsify, own.model, source, Sparsifying(kinds={"head": TWO_OF_FOUR}))


# The command


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    own = tiny.checkpoint()
    save(own, folder / "dense")
    np.save(folder / "images.npy", tiny.images(48))
    save_moments(calibrate(own, images(), batch_size=16), folder / "m.safetensors")
    return folder


def reduced(home: Path, name: str, *words: Any, code: int = 0) -> Result:
    given = ["reduce", "--model", home / "dense", "--moments", home / "m.safetensors", "--images", home / "images.npy"]
    return invoked(*given, *words, "-o", home / name, code=code)


NARROWER = ("--mlp", 0.5, "--attn", 0.5, "--align", "mlp=16,head=8")


@pytest.mark.slow("models")
@pytest.mark.parametrize(
    "widths",
    [
        (),
        (*NARROWER, "--closed-loop"),
        ("--macs", 0.6, "--align", "mlp=16,head=8"),
        (*NARROWER, "--polish", "layer", "--polish-steps", 1),
    ],
    ids=["alone", "loop", "budget", "polish"],
)
def test_written_model_is_sparse_and_records_it(home: Path, widths: tuple[Any, ...]) -> None:
    result = reduced(home, "sparse", *widths, "--sparse", "2:4", "--json")
    record = json.loads(result.stdout)["sparsity"]
    config = json.loads((home / "sparse" / "config.json").read_text())
    assert config["sparsity"] == {each["layer"]: "2:4" for each in record["layers"]}
    assert len(config["sparsity"]) == 8
    loaded = load_checkpoint(home / "sparse")
    assert loaded.sparsity == config["sparsity"]
    for name in config["sparsity"]:
        assert int(nonzeros(weight_of(loaded.model, name)).max()) <= 2, name
    assert record["macs_of_zeros"] * 2 == record["sparse_macs"] == sum(each["macs"] for each in record["layers"])
    narrower = sites_of(loaded.model).by_name["blocks.0.mlp"].width < 192
    assert narrower == bool(widths)


def test_kinds_are_sparsified_separately(home: Path) -> None:
    options = ("--sparse", "mlp=2:4,head=1:4", "--sparse-pattern", "cast", "--sparse-permute", "none")
    words = " ".join(reduced(home, "kinds", *options).output.split())
    assert "2:4, 1:4 sparse: 8 of 8 layers" in words or "1:4, 2:4 sparse: 8 of 8 layers" in words
    assert "1:4: for analysis, no engine has kernels for it; 2:4 has" in words
    assert "weights sparse" in words
    patterns = load_checkpoint(home / "kinds").sparsity
    assert {name.split(".")[2]: pattern for name, pattern in patterns.items()} == {"attn": "1:4", "mlp": "2:4"}


def test_weights_that_contradict_the_record_are_refused(home: Path) -> None:
    reduced(home, "edited", "--sparse", "mlp=2:4")
    weights, path = home / "edited" / "model.safetensors", home / "edited" / "config.json"
    state = load_file(weights)
    state["blocks.1.mlp.fc2.weight"][0, :4] = 1.0
    save_file(state, weights)
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"weights_sha256": sha256_of_file(weights)}))
    message = r"blocks\.1\.mlp\.fc2 is not 2:4: some 4 neighbouring weights have more than 2"
    rejects(message, load_checkpoint, home / "edited")
    weights.write_bytes((home / "dense" / "model.safetensors").read_bytes())
    config |= {"weights_sha256": sha256_of_file(weights), "sparsity": {"blocks.9.mlp.fc2": "2:4"}}
    path.write_text(json.dumps(config))
    rejects(r"the model has no layer 'blocks\.9\.mlp\.fc2'", load_checkpoint, home / "edited")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sparse", "4:2"), "expected K:N"),
        (("--sparse", "mlps=2:4"), "expected 2:4 for all sites"),
        (("--sparse", "mlp=2:4,mlp=1:4"), "each once"),
        (("--sparse", "2:4", "--within", "error 0.1"), "--within judges widths"),
        ((*NARROWER, "--closed-loop", "--sparse-permute", "none"), "has no effect on a reduction that sets no weights"),
    ],
)
def test_meaningless_options_are_refused(home: Path, words: tuple[Any, ...], message: str) -> None:
    result = reduced(home, "refused", *words, code=2)
    assert "Traceback" not in result.stderr
    assert message in " ".join(result.stderr.split())
    assert not (home / "refused").exists()


def test_sparsification_needs_images(home: Path) -> None:
    words = ["reduce", "--model", home / "dense", "--moments", home / "m.safetensors", "--sparse", "2:4"]
    refuses("--polish, --sparse, heads that are merged", *words, "-o", home / "none")


def test_sparsity_options_need_sparse_weights() -> None:
    assert ReduceOptions(sparse="mlp=2:4", sparse_pattern="cast", sparse_permute="none").needs_images
    rejects("--sparse-pattern cast has no effect on", ReduceOptions, mlp=0.5, sparse_pattern="cast")
    assert sparsities_from_text("2:4") == ALL


@cache
def sparse_form(form: str) -> Checkpoint:
    """Make a 2:4 sparse model: a ViT, one with narrower layers, or a convolutional network with groups."""
    if form == "resnext50_32x4d":
        network = small_convnets.checkpoint(form)
        model, report = sparsify(network.model, small_convnets.images_of(form, 48), Sparsifying(kinds=ALL))
        return replace(network, model=model, sparsity=report.patterns)
    own, (model, report) = tiny.checkpoint(), sparsified()
    if form == "narrow":
        moments = calibrate(own, images(), batch_size=16)
        method = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=16, align_head=8)
        model, report = sparsify(reduce(own.model, moments, method).model, images(), Sparsifying(kinds=ALL))
    return replace(own, model=model, sparsity=report.patterns)


def assert_two_of_four(path: Path, patterns: Any, dtype: str) -> None:
    """Require 2:4 weights along the summed axis of every layer, stored or dequantised.

    The node of a convolution with a folded norm has the norm's name.
    """
    graph = onnx.load(path).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
    nodes = {each.name.rpartition("/")[0]: each for each in graph.node if each.op_type in ("MatMul", "Conv")}
    for name in patterns:
        node = nodes.get(name) or nodes[name.replace("conv", "bn").replace("downsample.0", "downsample.1")]
        weight = stored[node.input[1]]
        assert str(weight.dtype) == dtype, name
        summed = np.moveaxis(weight, 0 if node.op_type == "MatMul" else 1, -1)
        assert (summed.reshape(*summed.shape[:-1], -1, 4) != 0).sum(-1).max() == 2, name


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("form", "precision", "dtype"),
    [
        ("narrow", "fp32", "float32"),
        ("narrow", "bf16", "bfloat16"),
        ("narrow", "int8", "int8"),
        ("narrow", "fp8", "float8_e4m3fn"),
        ("resnext50_32x4d", "fp32", "float32"),
        ("resnext50_32x4d", "fp16", "float16"),
    ],
)
def test_exported_groups_have_exact_zeros(tmp_path: Path, form: str, precision: str, dtype: str) -> None:
    own, chosen = sparse_form(form), Quantisation()
    if precision in ("int8", "fp8"):
        quantiser = quantiser_of(own, {"images": tiny.images(8)}, chosen)
        export_quantised(quantiser, tmp_path / "m.onnx", precision=precision, chosen=chosen)
    else:
        export_checkpoint(own, tmp_path / "m.onnx", precision=precision)
    assert_two_of_four(tmp_path / "m.onnx", own.sparsity, dtype)


@pytest.mark.slow("graph")
def test_graph_less_sparse_than_its_model_is_refused(tmp_path: Path) -> None:
    dense = replace(sparse_form("vit"), model=tiny.checkpoint().model)
    message = r"blocks\.0\.attn\.proj is 2:4 in the model, but not in the graph \(8 of 8"
    rejects(message, export_checkpoint, dense, tmp_path / "dense.onnx", precision="fp16")
    assert not (tmp_path / "dense.onnx").exists()
