"""INT8 and FP8 from command to record: graphs, unquantised blocks, parity and engines."""

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from corp_deploy.families.family import output_ports
from corp_deploy.proof.candidates import candidate_from_path, run_in_batches
from corp_deploy.proof.kept_sites import measure_quantised_bounds
from corp_deploy.proof.locate import build_fix_command
from corp_deploy.store.checkpoint import load_checkpoint, save
from corp_deploy.store.graph_facts import facts_of_onnx
from export.engine.record import record_of_plan
from export.engine.session import Library, convolution_remedies
from ground.feeds import Feeds, Outputs
from ground.precision import INT8
from ground.vulnerabilities import version_numbers
from perf.parity.rounding import rounded_graph
from perf.runners.onnx import OnnxRunner, onnx_precision
from tests import tiny
from tests.command import invoked, refuses
from tests.graphs import needs_rtx, session_of
from tests.refusals import rejects


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tiny.written(tmp_path_factory.mktemp("quantised"), 24)
    words = ["--precision", "fp32,fp16,int8,fp8", "--images", home / "images.npy", "--samples", 16]
    invoked("export", "--model", home / "dense", *words, "-o", home / "dense" / "model.onnx")
    return home


def verify(home: Path, output: Path, *words: object, code: int = 0) -> Any:
    """Verify the dense directory and its graph, then the graphs in the words, and return the record."""
    steps = (home / "dense", home / "dense", home / "dense" / "model.onnx")
    invoked("verify", *steps, *words, "--images", home / "images.npy", "-o", output / "parity.json", code=code)
    return json.loads((output / "parity.json").read_text())


@pytest.mark.slow("graph")
def test_verify_judges_against_the_dense_models_own_error(home: Path) -> None:
    graphs = [home / "dense" / f"model.{name}.onnx" for name in ("int8", "fp8")]
    links = {link["name"]: link for link in verify(home, home, *graphs, "--max-error", 0.5)["links"]}
    for name, shown in (("int8", "INT8"), ("fp8", "FP8")):
        link = links[f"dense-onnx-{name}"]
        assert (link["kind"], link["status"]) == ("quantised", "PASS")
        assert link["tolerance"]["rule"].startswith(f"2 x the dense model's own {shown} error")
        assert link["reference"].endswith("ONNX fp32")
        assert 1e-4 < link["measures"]["relative_error"] < link["tolerance"]["max_relative_error"]


def with_short_range(path: Path, kind: type[np.floating[Any]]) -> onnx.ModelProto:
    """Load a graph and shrink the range of one layer's inputs, so that most of them are clipped."""
    proto = onnx.load(path)
    for tensor in proto.graph.initializer:
        if tensor.name == "blocks.1.mlp.fc1/MatMul.input.scale":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(1e-4, kind), tensor.name))
    return proto


@pytest.mark.slow("graph")
def test_faulty_block_is_named_with_a_remedy(home: Path, tmp_path: Path) -> None:
    onnx.save(with_short_range(home / "dense" / "model.int8.onnx", np.float16), tmp_path / "model.int8.onnx")
    (located,) = verify(home, tmp_path, tmp_path / "model.int8.onnx", code=1)["located"]
    assert located["site"] == "blocks.1.mlp"
    assert "--precision int8" in located["command"]
    assert "--keep-rest 'blocks.1.mlp'" in located["command"]


@pytest.mark.slow("graph")
def test_rounded_graph_equals_fp8_arithmetic(home: Path, tmp_path: Path) -> None:
    """ONNX Runtime runs the FP8 graph itself without optimisations.

    All else is in FP32: another rounding of FP16 would move values to the next FP8 number, which is far away.
    """
    path = tmp_path / "model.fp8.onnx"
    words = ["--precision", "fp8", "--rest", "fp32", "--images", home / "images.npy"]
    invoked("export", "--model", home / "dense", *words, "-o", path)
    pixels = tiny.images(5, seed=3)
    sessions = session_of(path, optimised=False), session_of(rounded_graph(onnx.load(path)))
    one, two = (session.run(None, {"images": pixels})[0] for session in sessions)
    assert np.linalg.norm(one - two) < 0.01 * np.linalg.norm(one)
    rejects("a FP8 graph, and ONNX Runtime's CPU kernels have no arithmetic", OnnxRunner(path).__enter__)


@pytest.mark.slow("graph")
def test_auto_excludes_faulty_blocks(home: Path, tmp_path: Path) -> None:
    broken = tiny.checkpoint()
    with torch.no_grad():  # an outlier takes up the whole range of fc2's inputs, but fc2 gives it no weight
        mlp: Any = broken.model.get_submodule("blocks.1.mlp")
        mlp.fc1.weight[0] = 0.0
        mlp.fc1.bias[0] = 3000.0
        mlp.fc2.weight[:, 0] = 0.0
    save(broken, tmp_path / "broken")
    out = tmp_path / "model.onnx"
    words = ["--precision", "int8", "--scales", "max", "--images", home / "images.npy", "--auto"]
    done = invoked("export", "--model", tmp_path / "broken", "--dense", home / "dense", *words, "-o", out, "--json")
    (row,) = json.loads(done.stdout)["written"]
    kept = row["kept_rest"]
    assert kept[0] == "blocks.1.mlp"
    assert len(kept) <= 2
    checkpoint = load_checkpoint(tmp_path / "broken")
    bounds = measure_quantised_bounds(load_checkpoint(home / "dense"), "int8", {"images": tiny.images(24)})
    ports = output_ports(checkpoint.model)
    invoked("export", "--model", tmp_path / "broken", "-o", tmp_path / "exact.onnx")
    rows = []
    for path in (tmp_path / "exact.onnx", out):
        with candidate_from_path(path).opened(ports) as opened:
            rows.append(run_in_batches(opened, {"images": tiny.images(24)}, 8)[ports[0].name])
    error = np.linalg.norm(rows[1] - rows[0]) / np.linalg.norm(rows[0])
    assert error <= (bounds[ports[0].name].max_relative_error or 0)


@pytest.mark.slow("graph")
def test_kept_modules_stay_in_fp32(home: Path, tmp_path: Path) -> None:
    words = ["--precision", "int8,fp32", "--rest", "fp32", "--images", home / "images.npy", "--keep-rest", "blocks.0.*"]
    done = invoked("export", "--model", home / "dense", *words, "-o", tmp_path / "model.onnx", "--json")
    (row,) = [each for each in json.loads(done.stdout)["written"] if each["precision"] == "int8"]
    assert (row["rest"], row["kept_rest"]) == ("fp32", ["blocks.0.*"])
    step = candidate_from_path(tmp_path / "model.int8.onnx")
    assert step.float_type is INT8
    assert not step.emulated
    with OnnxRunner(tmp_path / "model.int8.onnx") as runner:
        assert runner.describe()["precision"] == "int8"


@pytest.fixture(scope="module")
def int8_graphs(home: Path) -> Path:
    """Export graphs that ONNX Runtime computes in INT8, with weights of eight and of seven bits."""
    words = ["--precision", "int8", "--rest", "fp32", "--scales", "max", "--images", home / "images.npy", "--json"]
    model = ["export", "--model", home / "dense", *words, "-o"]
    invoked(*model, home / "eight.int8.onnx")
    (row,) = json.loads(invoked(*model, home / "seven.int8.onnx", "--weight-bits", 7).stdout)["written"]
    assert row["weight_bits"] == 7
    return home


@pytest.mark.slow("graph")
def test_graph_reports_the_bits_of_its_weights(int8_graphs: Path) -> None:
    for name, bits in (("eight", 8), ("seven", 7)):
        path = int8_graphs / f"{name}.int8.onnx"
        assert facts_of_onnx(path).weight_bits == candidate_from_path(path).weight_bits == bits


class Saturating(OnnxRunner):
    """A runner whose INT8 kernels halve the outputs, but for graphs that run as typed."""

    def __call__(self, feeds: Feeds) -> Outputs:
        rows = super().__call__(feeds)
        is_exact = self.as_typed or onnx_precision(self.path) != "int8"
        return rows if is_exact else {name: values * np.float32(0.5) for name, values in rows.items()}


SATURATE = "this CPU's INT8 kernels saturate (no VNNI), serve it on a CPU with VNNI"


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("name", "vnni", "message"),
    [
        ("eight", False, f"{SATURATE}, or export with --weight-bits 7"),
        ("eight", None, "kernels differ, serve it on another CPU, or export with --weight-bits 7"),
        ("eight", True, "kernels compute something else, serve it on another CPU"),
        ("seven", False, "kernels compute something else, serve it on another CPU"),
    ],
)
def test_verify_separates_kernel_errors_from_graph_errors(
    int8_graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, vnni: bool | None, message: str
) -> None:
    monkeypatch.setattr("corp_deploy.proof.candidates.OnnxRunner", Saturating)
    monkeypatch.setattr("corp_deploy.proof.link_rules.has_vnni", lambda: vnni)
    words = (int8_graphs / f"{name}.int8.onnx", "--batch", 8, "--quantised-factor", 4)
    links = verify(int8_graphs, tmp_path, *words, code=1)["links"]
    (link,) = [each for each in links if each["kind"] == "quantised"]
    assert link["status"] == "FAIL"
    assert re.match(r"relative error 0\.5\d* over \S+ \(.+\); as typed its error is 0\.0\d+: ", link["reason"])
    assert link["reason"].endswith(message)
    assert all("as it is typed" not in each["reason"] for each in links if each is not link)


@pytest.mark.slow("graph")
def test_graph_errors_are_not_attributed_to_kernels(
    int8_graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corp_deploy.proof.candidates.OnnxRunner", Saturating)
    onnx.save(with_short_range(int8_graphs / "seven.int8.onnx", np.float32), tmp_path / "model.int8.onnx")
    (located,) = verify(int8_graphs, tmp_path, tmp_path / "model.int8.onnx", code=1)["located"]
    assert "--keep-rest 'blocks.1.mlp' --images IMAGES --rest fp32 --weight-bits 7" in located["command"]
    assert "as it is typed" not in (tmp_path / "parity.json").read_text()


def test_suggested_command_keeps_the_export_options() -> None:
    graph = Path("reduced/model.int8.onnx")
    assert "--rest fp32 --weight-bits 7" in build_fix_command(graph, float_type=INT8, rest="fp32", weight_bits=7)
    plain = build_fix_command(graph, float_type=INT8, rest="fp16")
    assert "--rest" not in plain.replace("--keep-rest", "")
    assert "--weight-bits" not in plain


@pytest.mark.slow("graph")
def test_impossible_requests_give_one_message(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.onnx"
    images = ("--images", home / "images.npy")
    calls: list[tuple[tuple[object, ...], str]] = [
        (("fp16", "--scales", "max"), "--scales"),
        (("fp16", "--rest", "fp32"), "--rest"),
        (("fp16", "--weight-bits", "7"), "--weight-bits"),
        (("int8", *images, "--keep-fp32", "head"), "--keep-fp32"),
        (("int8", *images, "--keep-rest", "blocks.7"), "fits no layer"),
    ]
    for words, message in calls:
        refuses(message, "export", "--model", home / "dense", "-o", out, "--precision", *words)
        assert not out.exists()


@pytest.mark.slow("graph")
def test_outdated_builder_is_reported(home: Path) -> None:
    old, new = (Library(name="tensorrt-rtx", version=version, module=None) for version in ("1.6.1.120", "1.7.1.116"))
    int8, fp8, fp16 = (onnx.load(home / "dense" / f"model.{name}.onnx") for name in ("int8", "fp8", "fp16"))
    (remedy,) = convolution_remedies(old, int8)
    assert remedy.endswith("export with --keep-rest patch_embed.proj, or build with tensorrt-rtx 1.7")
    for library, graph in ((new, int8), (old, fp8), (old, fp16)):
        assert convolution_remedies(library, graph) == []
    assert convolution_remedies(Library(name="tensorrt", version="10.16.1", module=None), int8) == []


@pytest.mark.slow("graph")
@needs_rtx
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_quantised_engine_keeps_fused_attention(home: Path, tmp_path: Path, precision: str) -> None:
    plan = tmp_path / "model.plan"
    graph = home / "dense" / f"model.{precision}.onnx"
    build = ("--backend", "tensorrt-rtx", "--sm", 89, "--batch", "1:4:8", "-o")
    if precision == "int8" and version_numbers(importlib.metadata.version("tensorrt-rtx")) < (1, 7):
        message = "it builds no convolution in INT8: export with --keep-rest patch_embed.proj, or"
        refuses(message, "build", graph, *build, plan)
        graph, kept = home / "kept.onnx", ("--images", home / "images.npy", "--keep-rest", "patch_embed.proj")
        invoked("export", "--model", home / "dense", "-o", graph, "--precision", "int8", *kept)
    invoked("build", graph, *build, plan)
    record = record_of_plan(plan)
    assert record.precision == precision
    assert record.fused_attention == len(record.attention_sites) == 2
    refuses("called fp16 but", "build", graph, *build, tmp_path / "other.plan", "--precision", "fp16")


@pytest.mark.slow("graph")
def test_ranges_of_a_grey_model_come_from_its_arrays(tmp_path: Path) -> None:
    """The model has no mean for one channel, and arrays need none."""
    save(tiny.checkpoint(in_chans=1, depth=1), tmp_path / "dense")
    np.save(tmp_path / "images.npy", tiny.images(8)[:, :1])
    words = ["--precision", "int8", "--scales", "max", "--images", tmp_path / "images.npy"]
    invoked("export", "--model", tmp_path / "dense", *words, "-o", tmp_path / "m.onnx")
    assert facts_of_onnx(tmp_path / "m.onnx").precision == "int8"
