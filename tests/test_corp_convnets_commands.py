"""A trained convolutional network through the commands, as a user would: what they say, write, refuse and prove."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from examples.digits.images import load
from tests.command import invoked

RESNET = Path(__file__).parents[1] / "examples" / "digits" / "resnet"
PLAIN = {"Conv", "Relu", "MaxPool", "Add", "AveragePool", "ReduceMean", "Reshape", "Gemm"}
# What older torch writes for the shape of its flattening, which newer writes as a number.
OF_SHAPE = {"Shape", "Concat"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrated, reduced to half and exported."""
    root = tmp_path_factory.mktemp("convnet")
    held_out = load("held-out")
    np.savez(root / "images.npz", images=load("train").images[:96])
    np.savez(root / "held-out.npz", images=held_out.images[:32], labels=held_out.labels[:32])
    invoked("calibrate", "--model", RESNET, "--images", root / "images.npz", "-o", root / "moments.safetensors")
    invoked("reduce", *given(root), "--conv", 0.5, "--align", "conv=8", "-o", root / "reduced")
    invoked("export", "--model", root / "reduced", "--precision", "fp32,fp16", "-o", root / "reduced/model.onnx")
    return root


def given(root: Path) -> tuple[object, ...]:
    return "--model", RESNET, "--moments", root / "moments.safetensors"


@pytest.mark.slow("graph")
def test_nothing_is_said_of_what_it_has_not(home: Path) -> None:
    """No MLPs, heads or attention; sites are blocks and stages by their names."""
    sweep = ("sweep", *given(home), "--images", home / "images.npz", "-o", home / "swept")
    inspected = invoked("inspect", "--model", RESNET).output
    printed = [
        inspected,
        invoked("reduce", *given(home), "--conv", 0.5, "-o", home / "again").output,
        invoked("inspect", "redundancy", "--moments", home / "moments.safetensors").output,
        invoked(*sweep, "--sparsity", 0.5, "--preset", "best").output,
    ]
    for text in printed:
        assert [word for word in ("MLP", "ttention", "Q/K", "heads", "padded") if word in text] == []
    assert all(name in inspected for name in ("conv1", "layer1.0", "layer1.1", "layer4.0"))
    assert "conv" in printed[-1]


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--mlp", 0.5), "--mlp 0.5 is not honoured by a model without MLPs"),
        (("--attn", 0.5), "--attn 0.5 is not honoured by a model without attention"),
        (("--conv", 0.5, "--heads", "square"), "--heads square is not honoured by a reduction that leaves attention"),
        (("--conv", 0.5, "--preset", "corp-v1"), "--conv 0.5 is not honoured by preset corp-v1"),
    ],
)
def test_what_it_has_not_is_refused_with_the_reason(words: tuple[object, ...], reason: str, home: Path) -> None:
    assert reason in invoked("reduce", *given(home), *words, "-o", home / "refused", code=2).output


@pytest.mark.slow("graph")
def test_graphs_are_plain_convolutions_with_norms_in_their_weights(home: Path) -> None:
    whole, half = (onnx.load(home / "reduced" / name) for name in ("model.onnx", "model.fp16.onnx"))
    assert {node.op_type for node in whole.graph.node} - OF_SHAPE == PLAIN
    assert {node.op_type for node in half.graph.node} - OF_SHAPE == PLAIN | {"Cast"}
    for model, kind in ((whole, TensorProto.FLOAT), (half, TensorProto.FLOAT16)):
        weights = [each for each in model.graph.initializer if each.data_type != TensorProto.INT64]
        assert {each.data_type for each in weights} == {kind}
    names = [node.name for node in whole.graph.node if node.op_type == "Conv"]
    assert "layer2.1.bn2/Conv" in names, "the norm's, which gives what both gave"


@pytest.mark.slow("models")
def test_a_broken_link_is_located_in_its_block(home: Path) -> None:
    """One convolution of the FP32 graph scaled: the proof names the block, not the first or the last one."""
    graph = onnx.load(home / "reduced" / "model.onnx")
    (node,) = (node for node in graph.graph.node if node.name == "layer2.1.bn2/Conv")
    (weight,) = (each for each in graph.graph.initializer if each.name == node.input[1])
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.5), weight.name))
    onnx.save(graph, home / "broken.onnx")
    chain = (RESNET, home / "reduced", home / "broken.onnx")
    result = invoked("verify", *chain, "--images", home / "held-out.npz", "-o", home / "broken.json", code=1)
    assert "layer2.1" in result.output
    (fault,) = json.loads((home / "broken.json").read_text())["located"]
    assert fault["site"].startswith("layer2.1")


@pytest.mark.slow("models")
def test_it_is_proved_link_by_link_and_packaged(home: Path) -> None:
    chain = (RESNET, home / "reduced", home / "reduced/model.onnx", home / "reduced/model.fp16.onnx")
    # Two thirds of the MACs are gone: the stem's last channels are halved too.
    limits = ("--min-agreement", 0.85, "--max-error", 0.15)
    invoked("verify", *chain, "--images", home / "held-out.npz", *limits, "-o", home / "parity.json")
    links = json.loads((home / "parity.json").read_text())["links"]
    assert [link["status"] for link in links] == ["PASS"] * 4
    invoked("package", home, "--name", "digits", "-o", home / "repository")
    invoked("package", "lint", home / "repository")


@pytest.mark.slow("graph")
def test_engines_are_built_of_both_precisions(home: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    for name in ("model", "model.fp16"):
        words = ("--backend", "tensorrt-rtx", "--batch", "1:4:8", "--sm", "86")
        built = invoked("build", home / f"reduced/{name}.onnx", *words, "-o", home / f"{name}.plan").output
        assert "the graph has none" in built, "no attention to fuse"
        assert (home / f"{name}.plan").stat().st_size > 100_000
