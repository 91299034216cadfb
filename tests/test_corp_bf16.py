"""BF16 from command to record: rounded graphs, blocks kept in FP32, engines and refusals."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from corp_deploy.families import traced_model
from corp_deploy.families.timm_library import NORMS
from corp_deploy.release.check import opened_graph
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.graph_facts import facts_of_onnx
from export.engine.record import record_of_plan
from export.graph.precision import typed_copy
from export.graph.weights import weight_shares
from ground.errors import BadInput
from perf.parity.rounding import rounded_graph
from perf.runners.onnx import OnnxRunner
from tests import tiny
from tests.command import invoked, refused, refuses, run
from tests.graphs import graph_of, needs_rtx
from tests.recipes import recipe

Array = NDArray[np.float32]
WEIGHT = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
RECIPE = recipe({
    "calibration": {"hold_out": 4, "batch_size": 4},
    "held_out": {"images": "held-out.npz"},
    "reduce": {"mlp": 0.3, "align_mlp": 8},
    "export": {"precisions": ["fp32", "bf16"]},
    "parity": {"batches": [1, 3]},
    "gate": {"fail_if": ["params >= dense"]},
})  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tiny.written(tmp_path_factory.mktemp("bf16"), 16)
    invoked("export", "--model", home / "dense", "--precision", "fp32,bf16", "-o", home / "dense" / "model.onnx")
    return home


def one_operator(kind: str, weight: Array) -> onnx.ModelProto:
    """Return a graph that computes float32 logits from float32 images by one operator in bfloat16."""
    return graph_of(
        f"""(float[batch,32] images) => (float[batch,N] logits) {{
            ["block/Cast"] x = Cast<to=16>(images)
            ["block/{kind}"] y = {kind}(x, w)
            ["head/Cast"] logits = Cast<to=1>(y)
        }}""",
        opset=22,
        w=weight.astype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)),
    )


def to_nearest_even(values: NDArray[np.floating]) -> Array:
    """Round to bfloat16 by the bits: add half a unit, less one if the last kept bit is even, then truncate."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("kind", ["Add", "Mul", "MatMul"])
def test_single_operator_is_rounded_bit_for_bit(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    images = (rng.standard_normal((64, 32)) * 10.0 ** rng.integers(-3, 4, (64, 32))).astype(np.float32)
    weight = WEIGHT if kind == "MatMul" else WEIGHT[:, 0]
    onnx.save(rounded_graph(one_operator(kind, weight)), tmp_path / "one.onnx")
    with OnnxRunner(tmp_path / "one.onnx") as runner:
        (found,) = runner({"images": images}).values()
    x, w = to_nearest_even(images).astype(np.float64), to_nearest_even(weight).astype(np.float64)
    exact = x @ w if kind == "MatMul" else x + w if kind == "Add" else x * w
    assert np.array_equal(found, to_nearest_even(exact))


@pytest.mark.slow("graph")
def test_rounded_graph_equals_torch_in_bfloat16(home: Path) -> None:
    model = load_checkpoint(home / "dense").model
    exportable, images = traced_model.exportable(model), tiny.images(16)
    with torch.inference_mode():
        exact = exportable(torch.from_numpy(images)).double().numpy()
        own = typed_copy(exportable, "bf16", norms=NORMS)(torch.from_numpy(images)).double().numpy()
    with opened_graph(home / "dense" / "model.bf16.onnx") as runner:
        (rounded,) = runner({"images": images}).values()
    size = np.linalg.norm(exact)
    error = np.linalg.norm(rounded - exact) / size
    assert 2**-11 < error < 2**-5
    assert np.linalg.norm(rounded - own) / size < 2 * error
    assert error == pytest.approx(np.linalg.norm(own - exact) / size, rel=0.5)


@pytest.mark.slow("graph")
def test_onnxruntime_on_a_cpu_never_runs_bfloat16(home: Path) -> None:
    with pytest.raises(BadInput, match=r"CPU kernels have no arithmetic in bfloat16.*verify needs neither"):
        OnnxRunner(home / "dense" / "model.bf16.onnx").__enter__()
    graphs = home / "dense" / "model.onnx", home / "dense" / "model.bf16.onnx"
    done = run("bench", *graphs, "--batch", "1", "-o", home / "bench.json")
    refused(done, "a BF16 graph", "CPU kernels have no arithmetic in bfloat16")
    words = ("build", graphs[1], "--backend", "onnxruntime", "-o", home / "o.onnx")
    refuses("compute in float32 and this graph is bf16", *words)


@pytest.mark.slow("graph")
def test_verify_rounds_the_graph_as_typed_and_reports_it(home: Path) -> None:
    steps = [home / "dense", home / "dense" / "model.onnx", home / "dense" / "model.bf16.onnx"]
    invoked("verify", home / "dense", *steps, "--images", home / "images.npy", "--max-error", "0.05",
               "--batch", "1,4", "-o", home / "parity.json")  # fmt: skip
    parity = json.loads((home / "parity.json").read_text())
    (link,) = (link for link in parity["links"] if link["kind"] == "half")
    assert (link["candidate"], link["status"]) == ("dense/model.bf16.onnx ONNX bf16", "PASS")
    assert "the dense model's own BF16 error" in json.dumps(link)
    assert "rounded as typed by ONNX Runtime, float32 arithmetic between" in json.dumps(link)
    assert not [test for test in parity["structure"] if test["test"] == "headroom"]


@pytest.mark.slow("graph")
def test_mixed_precision_finds_the_faulty_block(home: Path, tmp_path: Path) -> None:
    broken = load_checkpoint(home / "dense")
    with torch.no_grad():  # two equal channels whose large weights cancel but for less than bfloat16 resolves
        first = broken.model.get_submodule("blocks.1.mlp.fc1")
        last = broken.model.get_submodule("blocks.1.mlp.fc2")
        assert isinstance(first, torch.nn.Linear)
        assert isinstance(last, torch.nn.Linear)
        first.weight[1], first.bias[1] = first.weight[0], first.bias[0]
        last.weight[:, 0] += 300.0 * torch.linspace(1, 2, last.out_features)
        last.weight[:, 1] = -last.weight[:, 0]
        last.weight[:, 1] += 0.4 * torch.sin(torch.arange(last.out_features))
    save(broken, tmp_path / "broken")
    output = tmp_path / "m.onnx"
    done = invoked("export", "--model", tmp_path / "broken", "--precision", "mixed-bf16", "--auto", "--images",
               home / "images.npy", "--dense", home / "dense", "-o", output, "--json")  # fmt: skip
    result = json.loads(done.stdout)
    assert all(site.startswith("blocks.1") for site in result["kept_fp32"]), result
    assert result["written"][0]["precision"] == "mixed-bf16"
    assert facts_of_onnx(output).precision == "mixed-bf16"
    assert set(weight_shares(onnx.load(output))) == {"float32", "bfloat16"}
    healthy, words = tmp_path / "healthy.mixed-bf16.onnx", ("--precision", "mixed-bf16", "--auto")
    done = invoked("export", "--model", home / "dense", *words, "--images", home / "images.npy", "-o", healthy)
    assert "so the graph is bf16, not mixed-bf16" in done.output
    assert facts_of_onnx(healthy).precision == "bf16"


@pytest.mark.slow("graph")
@needs_rtx
def test_engine_reports_bf16_and_old_gpus_are_refused(home: Path, tmp_path: Path) -> None:
    graph, plan = home / "dense" / "model.bf16.onnx", tmp_path / "m.plan"
    build = ("build", graph, "--backend", "tensorrt-rtx", "--batch", "1:2:4", "--sm")
    invoked(*build, "86", "--precision", "bf16", "-o", plan)
    record = record_of_plan(plan)
    assert (record.precision, record.half_weight_share, record.weight_types) == ("bf16", 1.0, {"bfloat16": 1.0})
    assert record.kernel_types["bfloat16"] > 0.5
    assert "float16" not in record.kernel_types
    assert record.fused_attention_sites == record.attention_sites
    message = "holds bfloat16, which GPUs have from SM80 on, and --sm asks for 75"
    refuses(message, *build, "75", "-o", tmp_path / "o.plan")
    assert not (tmp_path / "o.plan").exists()
    assert json.loads(invoked("audit", graph, graph, "--sm", "86", "--json").stdout)["targets"][0]["passed"]


@pytest.mark.slow("graph")
def test_release_contains_bf16_and_replays_its_samples(home: Path) -> None:
    np.savez(home / "held-out.npz", images=tiny.images(9, seed=1))
    np.save(home / "calibration.npy", tiny.images(12))
    (home / "recipe.toml").write_text(RECIPE)
    invoked("release", home / "recipe.toml", "-o", home / "out")
    out = home / "out"
    assert facts_of_onnx(out / "reduced" / "model.bf16.onnx").precision == "bf16"
    links = {link["kind"]: link["status"] for link in json.loads((out / "parity.json").read_text())["links"]}
    assert links["half"] == "PASS"
    assert "samples replayed: all as they were made" in " ".join(invoked("check", out).stdout.replace("│", " ").split())
    (home / "recipe.toml").write_text(RECIPE + '\n[targets.onnxruntime-cpu]\nprecision = "bf16"\n')
    words = ("release", home / "recipe.toml", "-o", out)
    refuses("targets.onnxruntime-cpu: ONNX Runtime's CPU kernels have no arithmetic in bfloat16", *words)
