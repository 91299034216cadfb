"""Budgets, engines, gate, faults and calibrations made apart, through the commands."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import Result

from calib.store import load_moments
from corp_deploy.families.counting import macs
from corp_deploy.families.family import sites_of
from corp_deploy.planning.budget import allocate_uniformly as evenly
from corp_deploy.planning.budget import allocate_widths, find_uniform_for_share
from corp_deploy.planning.curves import compute_cost_curves, compute_eliminations
from corp_deploy.planning.first_plan import dense_cost
from corp_deploy.planning.judging import compute_outputs
from corp_deploy.planning.plan import choose_heads
from corp_deploy.planning.probe import Probe
from corp_deploy.proof.engine_search import RepairResult
from corp_deploy.proof.locate import build_fix_command
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.widths import aligned_width, aligned_widths, narrow_step
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.graph_facts import facts_of_onnx
from corp_deploy.traced.models.module import replace_submodules
from perf.parity.logits import measure_logits
from tests import tiny
from tests.command import invoked, refuses, run
from tests.export_served import write_onnx
from tests.graphs import needs_rtx


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.written(tmp_path_factory.mktemp("home"), 24)
    invoked("calibrate", "--model", root / "dense", "--images", root / "images.npy", "-o", root / "m.safetensors")
    return root


def reduced(home: Path, directory: Path, *extra: object) -> Result:
    return invoked("reduce", "--model", home / "dense", "--moments", home / "m.safetensors", "-o", directory, *extra)


# Widths


@pytest.mark.parametrize(
    ("dense", "kept", "align", "width"),
    [
        (3072, 0.5, 64, 1536),
        (64, 0.5, 16, 32),
        (32, 0.1, 16, 16),
        (48, 0.5, 64, 24),
    ],
)
def test_widths_round_to_the_nearest_multiple(dense: int, kept: float, align: int, width: int) -> None:
    assert aligned_width(dense, kept, align) == width
    assert aligned_width(dense, 1.0, align) == dense
    assert width in aligned_widths(dense, align)
    assert aligned_widths(dense, align)[-1] == dense


@pytest.mark.parametrize(("dense", "step"), [(16, 8), (64, 8), (96, 8), (127, 8), (128, 64), (3072, 64)])
def test_narrow_sites_use_a_smaller_multiple_by_default(dense: int, step: int) -> None:
    assert narrow_step(dense, 64) == step
    assert len(aligned_widths(dense, step)) > 1
    assert narrow_step(dense, 4) == 4


# Budgets


@pytest.fixture(scope="module")
def probe(home: Path) -> Probe:
    model = load_checkpoint(home / "dense").model
    method = method_from_preset("best", align_hidden=16, align_head=8, mlp_sparsity=0.5, attention_sparsity=0.5)
    moments = load_moments(home / "m.safetensors")
    images = torch.from_numpy(tiny.images(8))
    known = compute_eliminations(model, moments, method)
    return Probe(model=model, moments=moments, method=method, inputs=images, eliminations=known)


@pytest.mark.parametrize("currency", ["macs", "params"])
def test_budget_holds_and_beats_uniform_widths(probe: Probe, currency: Any) -> None:
    dense = dense_cost(probe.model, currency)
    sites = list(compute_cost_curves(probe, currency))
    found = allocate_widths(sites, dense, 0.7)
    assert found.share <= 0.7
    model = reduce(probe.model, probe.moments, probe.method, widths=found.widths).model
    cost = macs(model) if currency == "macs" else sum(p.numel() for p in model.parameters())
    assert cost == pytest.approx(found.share * dense, rel=1e-9)
    beside = find_uniform_for_share(probe.model, probe.method, sites, dense, 0.7)
    assert beside is not None
    assert find_uniform_for_share(probe.model, probe.method, sites, dense, 0.05) is None
    assert beside.share <= 0.7
    sparsity = float(beside.name.removeprefix("uniform sparsity "))
    less = replace(probe.method, mlp_sparsity=sparsity - 0.01, attention_sparsity=sparsity - 0.01)
    assert evenly(probe.model, less, sites, dense).share > 0.7, "the least sparsity that meets the budget"
    asked = replace(probe.method, mlp_sparsity=sparsity, attention_sparsity=sparsity)
    even = reduce(probe.model, probe.moments, asked).model
    narrower = {site.name: site.width for site in sites_of(even).every if site.kind != "traced values"}
    assert narrower.items() <= beside.widths.items()
    assert found.predicted_error <= beside.predicted_error
    images = torch.from_numpy(tiny.images(24))
    (reference,) = compute_outputs(probe.model, [images])
    errors = [measure_logits(reference, *compute_outputs(each, [images])).relative_error for each in (model, even)]
    assert errors[0] <= errors[1]


def test_heads_are_chosen_by_predicted_error(probe: Probe) -> None:
    taken = choose_heads(probe, 0.7)
    (reason,), best = taken.decisions, min(taken.ways, key=lambda way: way.predicted_error)
    assert f"heads: {taken.method.geometry}, because at 70.0% of the dense MACs its predicted logit error" in reason
    assert best.name == f"{taken.method.geometry} heads"
    reduction = reduce(probe.model, probe.moments, taken.method, widths=taken.widths)
    assert macs(reduction.model) <= 0.7 * dense_cost(probe.model, "macs")


@pytest.mark.parametrize(
    ("more", "said"), [(("--macs", 0.7), "--images"), (("--mlp", 0.5, "--select", "mlp=fold"), "mlp='fold': expected")]
)
def test_impossible_reductions_are_refused(home: Path, tmp_path: Path, more: tuple[object, ...], said: str) -> None:
    given = ("--model", home / "dense", "--moments", home / "m.safetensors", "-o", tmp_path / "r")
    refuses(said, "reduce", *given, *more)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("preset", ["best", "corp-v1", "grail", "grail-fold", "fold", "vbp", "none"])
def test_every_preset_reduces_and_round_trips(home: Path, tmp_path: Path, preset: str) -> None:
    keeps_heads = preset in ("grail", "grail-fold", "fold", "vbp")
    attention = [] if keeps_heads else ["--attn", 0.5]
    looked = ["--images", home / "images.npy"] if "fold" in preset else []
    words = ["--preset", preset, "--mlp", 0.5, *attention, "--align", "mlp=8,head=8", *looked]
    reduced(home, tmp_path / preset, *words)
    every = sites_of(load_checkpoint(tmp_path / preset).model).every
    widths = {(site.name.rpartition(".")[2], site.width) for site in every}
    assert widths == {("mlp", 96), ("qk", 3 * (16 if keeps_heads else 8)), ("v", 3 * 16)}


# Moments made apart


def test_duplicate_images_of_moments_count_once(home: Path, tmp_path: Path) -> None:
    both = (home / "m.safetensors", home / "m.safetensors")
    refuses("count twice", "calibrate", "--merge", *both, "-o", tmp_path / "c.safetensors")


def test_selected_sites_and_redundancy_are_reported(home: Path, tmp_path: Path) -> None:
    words = ["--model", home / "dense", "--images", home / "images.npy", "-o", tmp_path / "s.safetensors"]
    invoked("calibrate", *words, "--sites", "blocks.1.*", "--no-attention")
    assert "blocks.1.mlp.fc2" in load_moments(tmp_path / "s.safetensors").sites
    assert "fits no site" in run("calibrate", *words, "--sites", "layers.*").stderr
    invoked("inspect", "redundancy", "--moments", home / "m.safetensors", "-o", tmp_path / "r.svg")
    record = json.loads(invoked("inspect", "redundancy", "--moments", home / "m.safetensors", "--json").stdout)
    assert [site["site"] for site in record["sites"]][:2] == ["blocks.0.attn.qk", "blocks.0.attn.proj"]


def test_absent_gpu_exits_with_4(home: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    words = ["--model", home / "dense", "--images", home / "images.npy", "-o", tmp_path / "s.safetensors"]
    assert run("calibrate", *words, "--device", "cuda").exit_code == 4
    bench = ["bench", home / "dense", home / "dense", "--backend", "torch", "-o", tmp_path / "b.json"]
    assert run(*bench, "--device", "cuda").exit_code == 4
    assert list(tmp_path.iterdir()) == []


# Engines


@pytest.fixture(scope="module")
def half(home: Path) -> Path:
    """The dense model's fp16 graph, beside it what the command printed."""
    graph = home / "half" / "x.onnx"
    graph.parent.mkdir()
    result = invoked("export", "--model", home / "dense", "--precision", "fp16", "-o", graph, "--json")
    (home / "half.json").write_text(result.stdout)
    return graph


@pytest.fixture(scope="module")
def single(home: Path) -> Path:
    """The dense model's fp32 graph."""
    invoked("export", "--model", home / "dense", "-o", home / "dense.onnx")
    return home / "dense.onnx"


@pytest.mark.slow("graph", "engine")
@needs_rtx
def test_build_and_audit_commands_work(home: Path, half: Path, tmp_path: Path) -> None:
    reduced(home, padded := tmp_path / "padded", "--attn", 0.5, "--align", "head=8")
    graphs = {"dense": half}
    for name, extra in (("padded", []), ("ragged", ["--heads", "ragged"])):
        graphs[name] = tmp_path / f"{name}.fp16.onnx"
        invoked("export", "--model", padded, "-o", graphs[name], "--precision", "fp16", *extra)
    plan = tmp_path / "padded.plan"
    invoked("build", graphs["padded"], "--backend", "tensorrt-rtx", "--batch", "1:2:4", "--sm", "86", "-o", plan)
    record = json.loads((tmp_path / "padded.plan.json").read_text())
    assert (record["precision"], record["fused_attention"]) == ("fp16", 2)
    invoked("audit", graphs["dense"], graphs["padded"])
    lost = invoked("audit", graphs["dense"], graphs["ragged"], "-o", tmp_path / "audit.json", code=1)
    assert "blocks.0.attn" in lost.stdout


def test_absent_backend_exits_with_4_and_names_the_package(tmp_path: Path) -> None:
    try:
        import tensorrt  # noqa: F401

        pytest.skip("TensorRT is installed")
    except ImportError:
        pass
    graph = write_onnx(tmp_path / "m.onnx")
    refuses("pip install", "build", graph, "--batch", "1:2:4", "-o", tmp_path / "d.plan", code=4)
    assert not (tmp_path / "d.plan").exists()


@pytest.mark.slow("graph")
def test_single_precision_uses_the_given_file_and_several_get_suffixes(home: Path, half: Path, tmp_path: Path) -> None:
    printed = json.loads((home / "half.json").read_text())
    assert [Path(row["path"]).name for row in printed["written"]] == ["x.onnx"]
    assert facts_of_onnx(half).precision == "fp16"
    assert [path.name for path in half.parent.glob("*.onnx")] == ["x.onnx"]
    both = invoked("export", "--model", home / "dense", "--precision", "fp16,fp32", "-o", tmp_path / "y.onnx")
    lines = "".join(both.stdout.split())
    assert "y.onnx:fp32" in lines
    assert "y.fp16.onnx:fp16" in lines
    assert [facts_of_onnx(tmp_path / name).precision for name in ("y.onnx", "y.fp16.onnx")] == ["fp32", "fp16"]


# Proof


@pytest.mark.slow("graph")
def test_swapped_channel_is_located(home: Path, single: Path, tmp_path: Path) -> None:
    """The graph of another model than the torch one: the block where they part is named."""
    dense = load_checkpoint(home / "dense")
    faulty = replace_submodules(dense.model, {})
    weight = faulty.get_parameter("blocks.1.mlp.fc1.weight")
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]]
    save(Checkpoint(model=faulty, architecture=dense.architecture, lineage={}), tmp_path / "faulty")
    invoked("export", "--model", tmp_path / "faulty", "-o", tmp_path / "bad.onnx")
    words = ["--images", home / "images.npy", "-o", tmp_path / "p.json", "--batch", "1,3", "--max-error", 0.5]
    invoked("verify", home / "dense", home / "dense", single, *words)
    result = invoked("verify", home / "dense", home / "dense", tmp_path / "bad.onnx", *words, "--json", code=1)
    record = json.loads(result.stdout)
    assert record["located"][0]["site"] == "blocks.1.mlp"
    of_other = [link["status"] for link in record["links"] if "the graph is of another model" in link["reason"]]
    assert of_other == ["FAIL"]


def test_foreign_graph_fails_without_a_named_block(home: Path, single: Path, tmp_path: Path) -> None:
    save(tiny.checkpoint(seed=4), tmp_path / "other")
    graph = onnx.load(single)
    for index, node in enumerate(graph.graph.node):
        node.name = f"n{index}"
    onnx.save(graph, tmp_path / "x.onnx")
    words = ["--images", home / "images.npy", "-o", tmp_path / "p.json", "--batch", "4"]
    invoked("verify", tmp_path / "other", tmp_path / "other", tmp_path / "x.onnx", *words, code=1)
    record = json.loads((tmp_path / "p.json").read_text())
    assert (record["verdict"], record["located"]) == ("FAIL", [])
    assert "export it again" in str(record["links"])


def test_shifted_and_random_inputs_are_reported(home: Path, tmp_path: Path) -> None:
    far = tmp_path / "far.npy"
    np.save(far, 3.0 * tiny.images(24, seed=9) + 1.0)
    words = ["verify", home / "dense", home / "dense", "-o", tmp_path / "p.json", "--batch", "4", "--json"]
    words += ["--min-agreement", 1, "--confidence", 0]
    near = json.loads(invoked(*words, "--images", home / "images.npy", "--moments", home / "m.safetensors").stdout)
    assert near["shift"]["status"] == "PASS"
    shifted = json.loads(invoked(*words, "--images", far, "--moments", home / "m.safetensors").stdout)
    assert shifted["shift"]["status"] == "NOTED"
    assert any(row["test"] == "calibrated-range" and row["status"] == "NOTED" for row in shifted["structure"])
    assert json.loads(invoked(*words, "--random", 8).stdout)["images"]["kind"] == "random"
    assert run(*words).exit_code == 2


@pytest.mark.slow("graph")
def test_mixed_precision_finds_the_overflowing_block(home: Path, tmp_path: Path) -> None:
    """Values of one MLP pass 65,504 in half precision; only that block is kept in float32."""
    dense = load_checkpoint(home / "dense")
    hot = replace_submodules(dense.model, {})
    with torch.no_grad():
        for name, factor in (("fc1.weight", 3e4), ("fc1.bias", 3e4), ("fc2.weight", 1 / 3e4)):
            hot.get_parameter(f"blocks.1.mlp.{name}").mul_(factor)
    save(Checkpoint(model=hot, architecture=dense.architecture, lineage={}), tmp_path / "hot")
    result = invoked(
        "export", "--model", tmp_path / "hot", "--dense", home / "dense", "--precision", "mixed", "--auto",
        "--images", home / "images.npy", "--batch", 4, "-o", tmp_path / "hot.mixed.onnx", "--json",
    )  # fmt: skip
    assert json.loads(result.stdout)["kept_fp32"] == ["blocks.1.mlp"]
    facts = facts_of_onnx(tmp_path / "hot.mixed.onnx")
    assert (facts.precision, facts.batch) == ("mixed", 4)
    carried = {entry.key: entry.value for entry in onnx.load(tmp_path / "hot.mixed.onnx").metadata_props}
    assert carried["export.keep_fp32"] == "blocks.1.mlp"
    assert "--keep-fp32 '{site}' --output" in build_fix_command(Path("reduced/model.fp16.onnx")), (
        "and not 'blocks.1*', nor 10, 11"
    )
    words = [
        "--images",
        home / "images.npy",
        "-o",
        tmp_path / "p.json",
        "--half-factor",
        8,
        "--max-error",
        0.5,
        "--batch",
    ]
    other = invoked("verify", tmp_path / "hot", tmp_path / "hot.mixed.onnx", *words, "1,7", code=2)
    assert "its batch is fixed at 4, and --batch 1,7 leaves that out" in " ".join(other.stderr.split())
    words += ["4"]
    invoked("export", "--model", tmp_path / "hot", "-o", tmp_path / "single.onnx")
    invoked("verify", tmp_path / "hot", tmp_path / "hot", tmp_path / "single.onnx", tmp_path / "hot.mixed.onnx", *words)
    assert (
        "mixed needs --keep-fp32 PATTERN, such as blocks.7.attn, or --auto, or both"
        in run("export", "--model", home / "dense", "--precision", "mixed", "-o", tmp_path / "x.onnx").stderr
    )


@pytest.mark.slow("graph")
def test_mixed_graph_without_kept_blocks_is_fp16(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, its metadata and what is printed say so, and --batch and --heads are in it."""
    sought: list[str] = []

    def nothing(*_: object, geometry: str, **__: object) -> RepairResult:
        sought.append(geometry)
        return RepairResult()

    monkeypatch.setattr("corp_deploy.proof.graphs.find_sites_to_keep", nothing)
    reduced(home, narrow := tmp_path / "narrow", "--attn", 0.5, "--align", "head=8")
    words = ["export", "--model", narrow, "--images", home / "images.npy", "--auto", "--batch", 2, "--heads", "ragged"]
    result = invoked(*words, "--precision", "fp32,mixed", "-o", tmp_path / "m.onnx")
    assert "so the graph is fp16, not mixed" in " ".join(result.stdout.split())
    assert sorted(path.name for path in tmp_path.glob("*.onnx")) == ["m.fp16.onnx", "m.onnx"]
    half = onnx.load(tmp_path / "m.fp16.onnx")
    carried = {entry.key: entry.value for entry in half.metadata_props}
    assert (carried["export.precision"], carried.get("export.keep_fp32", ""), sought) == ("fp16", "", ["ragged"])
    assert half.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
    assert not any(node.op_type == "Pad" for node in half.graph.node)


# Gate


TOO_FEW = (
    "can't be shown by 24 images: even 24 of 24 agreeing would leave 86.20 % to 100 % at 95 % confidence; at least 189 "
    "images are needed, or a confidence of at most 0.51, or a limit of at most 0.862"
)
OPEN = (
    "100 % (86.20 % to 100 % at 95 % confidence), limit 98 %: the interval straddles the limit; about 189 images would "
    "decide if the share stays; these are 24"
)


def test_verify_and_gate_judge_figures_alike(home: Path, tmp_path: Path) -> None:
    """The same limit, verdict, words and exit code, and the same where the point alone is asked for."""
    words = ["verify", home / "dense", home / "dense", "--images", home / "images.npy", "--batch", "4"]
    words += ["--min-agreement", 0.98, "-o", tmp_path / "parity.json"]
    rule = ["gate", tmp_path / "parity.json", "--fail-if", "top1_agreement < 0.98", "--json"]
    verified = invoked(*words, code=3)
    assert f"INCONCLUSIVE (1 link judged) on 24 images: dense: top-1 agreement {OPEN}" in " ".join(
        verified.stdout.split()
    )
    assert f"min agreement 98 % {TOO_FEW}" in " ".join(verified.stderr.split())
    judged = json.loads(invoked(*rule, code=3).stdout)
    assert (judged["verdict"], judged["confidence"]) == ("INCONCLUSIVE", 0.95)
    proof, own = judged["rules"]
    assert (proof["verdict"], own["verdict"], own["message"]) == ("INCONCLUSIVE", "INCONCLUSIVE", OPEN)
    record = json.loads((tmp_path / "parity.json").read_text())
    assert (record["links"][0]["status"], record["links"][0]["tolerance"]["confidence"]) == ("INCONCLUSIVE", 0.95)
    assert "can't be shown" not in invoked(*words, "--confidence", 0).stderr
    passed = json.loads(invoked(*rule, "--confidence", 0).stdout)
    assert passed["rules"][1]["message"] == "100 %, limit 98 % (the point alone decides)"
    (link,) = json.loads((tmp_path / "parity.json").read_text())["links"]
    assert link["reason"] == "top-1 agreement 100 %, limit 98 % (the point alone decides)"
    assert link["tolerance"]["confidence"] == 0


def test_zero_width_confidence_is_refused(home: Path, tmp_path: Path) -> None:
    words = ["verify", home / "dense", home / "dense", "--images", home / "images.npy", "-o", tmp_path / "parity.json"]
    alone = invoked(*words, "--max-error", 1, "--confidence", 0.9, code=2)
    assert "--confidence has no effect without a share of inputs to judge; give --min-agreement" in alone.stderr
    refuses("'95': expected a share in [0, 0.999]", *words, "--min-agreement", 0.5, "--confidence", 95)
    invoked(*words, "--min-agreement", 0.5)
    unruled = invoked("gate", tmp_path / "parity.json", "--confidence", 0.9, code=2)
    assert "--confidence has no effect without rules to judge" in unruled.stderr


@pytest.mark.slow("measurement")
def test_gate_and_compare_commands_work(home: Path, tmp_path: Path) -> None:
    reduced(home, small := tmp_path / "small", "--mlp", 0.75, "--align", "mlp=8")
    bench = tmp_path / "bench.json"
    invoked("bench", home / "dense", small, "--backend", "torch", "--batch", "4", "--time-limit", 1, "-o", bench)
    others = tmp_path / "others.npy"
    np.save(others, tiny.images(24, seed=1))
    proof = ("verify", home / "dense", small, "--images", others, "-o", tmp_path / "parity.json")
    free = invoked(*proof, code=3)
    assert "UNJUDGED (0 links judged, 1 measured without a limit) on 24 images" in free.stdout
    assert "no limit judged logits: set --max-error or --min-agreement" in free.stderr
    files = [bench, tmp_path / "parity.json"]
    out = [word for suffix in ("json", "md", "xml") for word in ("-o", tmp_path / f"gate.{suffix}")]
    invoked(
        *("gate", *files, "--fail-if", "relative_error > 10", "--fail-if", "size_bytes > dense", *out, "--track"),
        tmp_path / "t",
    )
    judged = json.loads((tmp_path / "gate.json").read_text())
    assert judged["verdict"] == "PASS"
    assert [row["verdict"] for row in judged["rules"]] == ["UNJUDGED", "PASS", "PASS", "PASS"]
    assert judged["rules"][0]["message"].startswith("UNJUDGED (0 links judged, 1 measured without a limit)")
    assert (tmp_path / "t" / "smaller-is-better.json").is_file()
    invoked("gate", *files, "--fail-if", "size_bytes < dense", code=1)
    words = ["gate", bench, "--fail-if", "size_bytes > baseline", "--baseline", tmp_path / "base.json"]
    assert "--init-baseline" in run(*words).stderr
    invoked(*words, "--init-baseline", "--fail-if", "size_bytes < dense", code=1)
    assert not (tmp_path / "base.json").exists(), "only a record that passes becomes the baseline"
    invoked(*words, "--init-baseline")
    assert (tmp_path / "base.json").read_bytes() == bench.read_bytes()
    invoked(*words)
    invoked(*proof, "--max-error", 0, code=1)
    invoked(*words[:2], tmp_path / "parity.json", *words[2:4], "--baseline", tmp_path / "b", "--init-baseline", code=1)
    assert not (tmp_path / "b").exists(), "nor one whose proof fails"
    invoked("gate", tmp_path / "parity.json", code=1)
    assert "nothing to judge" in run("gate", bench).stderr
    assert run("gate", *files, "--fail-if", "speed is good").exit_code == 2
    assert "no difference" in invoked("bench", "compare", bench, bench).stdout
