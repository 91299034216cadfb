"""The public functions: the same files as the commands write, values from memory, and one message for a mistake."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import click
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import corp_deploy
from calib.store import load_moments
from corp_deploy.api.in_python import message_in_python
from corp_deploy.api.models import open_inputs
from corp_deploy.cli import main
from corp_deploy.families.counting import parameters
from corp_deploy.invocation.input_choice import KINDS
from corp_deploy.invocation.option import options_of
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.invocation.source import ModelSource
from corp_deploy.store.checkpoint import load_weights
from corp_deploy.store.graph_facts import facts_of_onnx
from ground.errors import BadInput
from ground.files import sha256_of_file
from tests import tiny
from tests.command import invoked
from tests.pages import ROOT
from tests.refusals import rejects

FUNCTIONS = ("bench", "calibrate", "export", "load", "reduce", "report", "ship", "sites", "verify")
# What commands have for terminals, processes and whole machines.
OF_COMMANDS = {
    "calibrate": {"shard", "checkpoint_every", "sequential", "summary"},
    "reduce": {"workers", "max_bad"},
    "export": set(),
    "verify": {"random", "metric", "metric_time_limit", "polygraphy", "other_graph", "write_golden"}
    | {"length", "provider"},
    "bench": {"lengths", "cached"},
    "ship": set(),
}
OF_SOURCES = {*options_of(ModelSource), *KINDS, "model", "trust_code"}
"""What commands take beside a model's name and its inputs, which Python has as values."""
PLAIN = {"model", "reference", "dense", "reduced", "inputs", "output", "trust_code", "trust_engine"}
"""Names that say it themselves, or mean what the command's option of the name does."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, images and what the commands make of them."""
    home = tiny.written(tmp_path_factory.mktemp("home"), 24)
    dense, images = ["--model", home / "dense"], ["--images", home / "images.npy"]
    invoked("calibrate", *dense, *images, "--hold-out", 6, "--batch-size", 5, "-o", home / "m.safetensors")
    held = ["--held-out", home / "m.held-out.safetensors"]
    invoked(
        "reduce", *dense, "--moments", home / "m.safetensors", *held, *images, "--macs", 0.8, "-o", home / "reduced"
    )
    invoked("export", "--model", home / "reduced", "--precision", "fp16", "-o", home / "model.onnx")
    return home


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_state_arguments_returns_and_errors(name: str) -> None:
    function = getattr(corp_deploy, name)
    assert get_type_hints(function).keys() >= inspect.signature(function).parameters.keys() | {"return"}
    words = inspect.getdoc(function) or ""
    assert "Raises BadInput" in words or "Raises:\n    BadInput: " in words
    for parameter in inspect.signature(function).parameters:
        named = f"`{parameter}`" in words or f"\n    {parameter}: " in words
        assert named or parameter in PLAIN, (name, parameter)


def test_public_names_are_exactly_the_documented_ones() -> None:
    assert sorted(corp_deploy.__all__) == corp_deploy.__all__
    assert all(getattr(corp_deploy, name) is not None for name in corp_deploy.__all__)
    assert set(corp_deploy.__all__) <= set(dir(corp_deploy))
    with pytest.raises(AttributeError, match="no attribute 'calibrat'"):
        _ = corp_deploy.calibrat  # type: ignore[attr-defined]


def test_importing_the_package_and_its_records_imports_no_torch() -> None:
    code = "import sys, corp_deploy; assert not {'torch', 'timm', 'click', 'numpy'} & sys.modules.keys()"
    code += "; import corp_deploy.proof.report_input; assert not {'torch', 'timm', 'onnx'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("name", sorted(OF_COMMANDS))
def test_every_command_option_is_a_parameter_or_listed_as_command_only(name: str) -> None:
    options = {each.name for each in main.commands[name].params if isinstance(each, click.Option)}
    parameters = set(inspect.signature(getattr(corp_deploy, name)).parameters)
    assert options - parameters - OF_SOURCES - {"as_json", "quiet"} == OF_COMMANDS[name]


@pytest.mark.slow("graph")
def test_python_writes_the_same_files_as_the_commands(home: Path, tmp_path: Path) -> None:
    dense, images = home / "dense", home / "images.npy"
    calibration = corp_deploy.calibrate(dense, images, tmp_path / "m.safetensors", hold_out=6, batch_size=5)
    assert calibration.held_out == tmp_path / "m.held-out.safetensors"
    assert (calibration.inputs, calibration.moments.images) == (18, 18)
    for name in ("m.safetensors", "m.held-out.safetensors"):
        assert sha256_of_file(tmp_path / name) == sha256_of_file(home / name), name
    reduced = corp_deploy.reduce(
        dense, calibration, tmp_path / "reduced", inputs=images, macs=0.8, held_out=calibration.held_out
    )
    for name in ("model.safetensors", "config.json"):
        assert sha256_of_file(tmp_path / "reduced" / name) == sha256_of_file(home / "reduced" / name), name
    graph = corp_deploy.export(reduced, tmp_path / "model.onnx", precision="fp16")
    assert (graph.sha256, graph.precision) == (sha256_of_file(home / "model.onnx"), "fp16")
    assert graph.size_bytes == graph.path.stat().st_size


@pytest.mark.slow("models")
def test_verify_uses_images_the_calibration_held_out(home: Path, tmp_path: Path) -> None:
    """By the same values; the reduction is not shown those images, and labels are of all."""
    dense, images = home / "dense", home / "images.npy"
    calibrated = corp_deploy.calibrate(dense, images, tmp_path / "m.safetensors", hold_out=6, groups="image")
    held_out = load_moments(tmp_path / "m.held-out.safetensors")
    with pytest.raises(BadInput, match="`groups` says which images `hold_out` takes together; give both, or none"):
        corp_deploy.reduce(dense, calibrated, tmp_path / "r", inputs=images, macs=0.8, groups="image")
    reduced = corp_deploy.reduce(dense, calibrated, tmp_path / "r", inputs=images, macs=0.8, hold_out=6, groups="image")
    every = open_inputs(tiny.checkpoint().model, images)
    was_fitted = ~torch.isin(every.ids, held_out.image_ids).numpy()
    fitted = np.load(images)[was_fitted]
    again = corp_deploy.reduce(dense, calibrated, tmp_path / "again", inputs=fitted, macs=0.8)
    assert sha256_of_file(reduced.path / "model.safetensors") == sha256_of_file(again.path / "model.safetensors")
    labels = np.arange(24) % 7
    proof = corp_deploy.verify(dense, reduced, images, labels=labels, hold_out=6, groups="image")
    assert (proof.images.count, proof.images.digest) == (6, held_out.lineage["images"])
    assert len(proof.accuracy) == 2


def test_inputs_in_memory_equal_those_of_a_file(home: Path, tmp_path: Path) -> None:
    array = tiny.images(24)
    given: tuple[Any, ...] = (home / "images.npy", array, torch.from_numpy(array))
    sums = [
        corp_deploy.calibrate(home / "dense", inputs, tmp_path / f"{place}.safetensors", samples=9, seed=3).moments
        for place, inputs in enumerate(given)
    ]
    first = sums[0]
    for other in sums[1:]:
        assert torch.equal(first.image_ids, other.image_ids)
        for name, site in first.sites.items():
            own, same = (asdict(each) for each in (site, other.sites[name]))
            torch.testing.assert_close(own, same, rtol=0, atol=0)
    assert sums[1].lineage == sums[2].lineage


def test_files_of_any_name_declare_a_modules_inputs(tmp_path: Path) -> None:
    """Images in a .safetensors are no moments, and moments are what they are by any name."""
    torch.manual_seed(0)
    layers = (
        torch.nn.Conv2d(3, 8, 4, 4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
    )
    net, images = torch.nn.Sequential(*layers, torch.nn.Linear(8 * 9, 5)).eval(), torch.randn(24, 3, 20, 20)
    save_file({"images": images}, tmp_path / "images.safetensors")
    calibration = corp_deploy.calibrate(net, images, tmp_path / "m")
    assert calibration.moments.images == 24
    reduced = corp_deploy.reduce(net, calibration, tmp_path / "r", conv=0.5, align={"conv": 4})
    assert reduced.parameters[1] < reduced.parameters[0]
    net.input_size = (3, 20, 20)  # type: ignore[assignment]
    again = corp_deploy.calibrate(net, tmp_path / "images.safetensors", tmp_path / "again")
    assert torch.equal(again.moments.image_ids, calibration.moments.image_ids)


def test_verify_accepts_labels_in_memory(home: Path, tmp_path: Path) -> None:
    images, labels = tiny.images(16), np.arange(16) % 7
    proof = corp_deploy.verify(
        home / "dense", [home / "reduced", home / "model.onnx"], images, labels=labels, batches=(1, 8), max_error=10.0,
        min_agreement=0.0, output=tmp_path / "parity.json",
    )  # fmt: skip
    # Both against the dense model, and the graph against its module.
    assert (proof.verdict, len(proof.links)) == ("PASS", 3)
    logits = corp_deploy.load(home / "dense")(torch.from_numpy(images))
    assert proof.accuracy[0].correct == int((logits.argmax(1).numpy() == labels).sum())
    assert (tmp_path / "parity.json").is_file()
    assert (tmp_path / "parity.npz").is_file()
    failed = corp_deploy.verify(home / "dense", home / "reduced", images, batches=(4,), max_error=1e-9)
    assert failed.verdict == "FAIL"
    assert corp_deploy.verify(home / "dense", home / "reduced", images, batches=(4,)).verdict == "UNJUDGED"


@pytest.mark.slow("graph", "measurement")
def test_bench_returns_rows_by_batch(home: Path, tmp_path: Path) -> None:
    quick: dict[str, Any] = {"time_limit": 0.5, "half_width": 0.9, "min_rounds": 6, "block_ms": 1.0}
    corp_deploy.export(home / "dense", tmp_path / "dense.onnx")
    corp_deploy.export(home / "reduced", tmp_path / "reduced.onnx")
    speed = corp_deploy.bench(
        tmp_path / "dense.onnx", tmp_path / "reduced.onnx", batches=(1, 2), output=tmp_path / "bench.json", **quick
    )
    assert list(speed.speedups) == [1, 2]
    assert [row.batch for row in speed.record.rows] == [1, 2]
    assert isinstance(speed.warnings, tuple)
    invoked("gate", tmp_path / "bench.json", "--fail-if", "size_bytes > dense * 2")


@pytest.mark.slow("graph")
def test_calibrated_precisions_need_inputs(home: Path, tmp_path: Path) -> None:
    images = tiny.images(8)
    mixed = corp_deploy.export(home / "dense", tmp_path / "m.onnx", precision="mixed", keep_fp32=["blocks.1"])
    assert (mixed.precision, mixed.kept) == ("mixed", ("blocks.1",))
    found = corp_deploy.export(home / "dense", tmp_path / "a.onnx", precision="mixed", auto=True, inputs=images)
    assert found.precision == ("mixed" if found.kept else "fp16")
    int8 = corp_deploy.export(home / "dense", tmp_path / "q.onnx", precision="int8", inputs=images, rest="fp32")
    assert int8.precision == "int8"
    options: dict[str, Any] = {"precision": "int8", "inputs": images, "rest": "fp32", "weight_bits": 7}
    assert facts_of_onnx(corp_deploy.export(home / "dense", tmp_path / "seven.onnx", **options).path).weight_bits == 7


def test_images_and_texts_together_are_refused_before_timing(home: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="`text` and `inputs` exclude each other; give what the model takes"):
        corp_deploy.bench(home / "dense", home / "dense", inputs=home / "images.npy", text=tmp_path / "texts.txt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp12"}, "`precision`: 'fp12': expected one of fp32"),
        ({"precision": "mixed"}, "mixed needs `keep_fp32=PATTERN`, such as blocks.7.attn, or `auto=True`, or both"),
        ({"precision": "int8"}, "computes its ranges from real inputs; give `inputs`"),
        (
            {"precision": "mixed", "auto": True},
            "`auto=True` looks for the blocks on real inputs; give `auto=True` and `inputs` together",
        ),
        ({"auto": True, "inputs": tiny.images(2)}, "`auto=True` has no effect on precision fp32"),
        ({"keep_fp32": ["blocks.0"]}, "`keep_fp32='blocks.0'` has no effect on precision fp32"),
        (
            {"precision": "int8", "inputs": tiny.images(2), "weight_bits": 6},
            "`weight_bits`: '6': expected a whole number from 7 to 8",
        ),
        ({"heads": "padded"}, "`heads='padded'`"),
    ],
)
def test_impossible_graph_is_refused(home: Path, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    rejects(re.escape(said), corp_deploy.export, home / "dense", tmp_path / "x.onnx", **options)
    assert list(tmp_path.iterdir()) == []


def test_mistakes_give_one_message_and_write_nothing(home: Path, tmp_path: Path) -> None:
    dense, moments, images = home / "dense", home / "m.safetensors", home / "images.npy"
    out = tmp_path / "reduced"
    with pytest.raises(TypeError, match="argument 'mpl'; its options are model, moments, output, mlp"):
        corp_deploy.reduce(dense, moments, out, mpl=0.5)  # type: ignore[call-arg]
    rejects("nothing asked for", corp_deploy.reduce, dense, moments, out)
    rejects("`polish_steps=3` has no effect on", corp_deploy.reduce, dense, moments, out, mlp=0.5, polish_steps=3)
    rejects("several budgets", corp_deploy.reduce, dense, moments, out, inputs=images, macs=0.5, params=0.5)
    rejects("missing: no such directory", corp_deploy.load, tmp_path / "missing")
    rejects(r"needs `Source\(weights=\.\.\.\)`", corp_deploy.load, corp_deploy.Source("vit_tiny_patch16_224"))
    rejects("gone: no such", corp_deploy.calibrate, dense, tmp_path / "gone", tmp_path / "m.safetensors")
    with pytest.raises(corp_deploy.BadInput, match="give `attention_system=True` with it"):
        corp_deploy.calibrate(dense, images, tmp_path / "m.safetensors", attn=[0.5])
    rejects("candidates: got none", corp_deploy.verify, dense, [], images)
    rejects(r"expected \.json", corp_deploy.verify, dense, home / "reduced", images, output=tmp_path / "p.npz")
    if not torch.cuda.is_available():
        with pytest.raises(corp_deploy.Missing):
            corp_deploy.calibrate(dense, images, tmp_path / "m.safetensors", device="cuda")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "call", [corp_deploy.load, corp_deploy.Source, lambda model: corp_deploy.export(model, "x.onnx")]
)
@pytest.mark.parametrize("model", [5, None, ["dense"]])
def test_invalid_models_raise_bad_input(call: Callable[[Any], Any], model: Any) -> None:
    rejects("expected a name, a directory or a module", call, model)


def test_model_source_validates_its_arguments(tmp_path: Path) -> None:
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3).eval()
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    said: dict[str, Any] = {"kwargs": {"img_size": 32, "depth": 1}, "mean": [0.1], "outputs": ["class", "patches"]}
    source = corp_deploy.Source("vit_tiny_patch16_224", tmp_path / "w.safetensors", **said)
    images = torch.randn(2, 3, 32, 32)
    tokens, patches = corp_deploy.load(source)(images)
    features: Any = net.forward_features
    torch.testing.assert_close(tokens, features(images)[:, 0], rtol=1e-5, atol=1e-5)
    assert patches.shape == (2, 4, 192)
    calibration = corp_deploy.calibrate(source, images, tmp_path / "m.safetensors")
    assert '"mean": [0.1, 0.1, 0.1]' in calibration.record["lineage"]["preprocessing"]


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_timm_module_in_memory_passes_the_chain(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=5)
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    images = torch.randn(4, 3, 160, 160)
    calibration = corp_deploy.calibrate(net, images, tmp_path / "m.safetensors", batch_size=2)
    kind: dict[str, Any] = {"conv": 0.0} if "resnet" in name else {"mlp": 0.0}
    reduced = corp_deploy.reduce(net, calibration, tmp_path / "r", **kind)
    with torch.inference_mode():
        expected: torch.Tensor = net.eval()(images)
        apart = (corp_deploy.load(reduced)(images) - expected).norm() / expected.norm()
    assert apart < 1e-4
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())


class Net(torch.nn.Module):
    """No library's: patches, an MLP behind a shortcut, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = torch.nn.Conv2d(3, 32, 4, stride=4), torch.nn.Linear(32, 5)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(images).flatten(2).transpose(1, 2)
        tokens = tokens + self.down(torch.relu(self.up(tokens)))
        return self.head(tokens.mean(1))


def test_custom_module_in_memory_passes_the_chain(tmp_path: Path) -> None:
    """Its directory loads beside it, of the size of the images that it was calibrated on, and by itself says so."""
    torch.manual_seed(0)
    net, images = Net().train(), torch.randn(40, 3, 32, 32)
    calibration = corp_deploy.calibrate(net, images, tmp_path / "m.safetensors")
    reduced = corp_deploy.reduce(net, calibration, tmp_path / "r", mlp=0.5, align={"mlp": 8})
    assert net.training
    assert reduced.module is net
    assert "needs the module beside it" in reduced.notes[-1]
    again = corp_deploy.load(corp_deploy.Source(reduced.path, module=Net()))
    torch.testing.assert_close(again(images), reduced.model(images), rtol=0, atol=0)
    expected = net.eval()(images)
    assert 0 < (again(images) - expected).norm() / expected.norm() < 0.3
    assert corp_deploy.verify(net, reduced, images, batches=(4,), max_error=0.3).verdict == "PASS"
    rejects(r"Net: the model was a module in memory.*Source\(DIR, module=MODULE", corp_deploy.load, reduced.path)
    with pytest.raises(corp_deploy.BadInput, match=r"a torch.nn.modules.linear.Linear, and the directory's model was"):
        corp_deploy.load(corp_deploy.Source(reduced.path, module=torch.nn.Linear(2, 2)))
    rejects(
        "model is a reduced module in memory", corp_deploy.reduce, reduced.model, calibration, tmp_path / "s", mlp=0.5
    )
    rejects("a Net in memory can't be timed; export both", corp_deploy.bench, net, reduced)  # type: ignore[arg-type]
    with pytest.raises(corp_deploy.BadInput, match="candidates: a Net; give what reduce returned"):
        corp_deploy.verify(net, net, images)  # type: ignore[arg-type]


class Tied(torch.nn.Module):
    """Two MLPs of one first weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = torch.nn.Conv2d(3, 16, 4, stride=4), torch.nn.Linear(16, 5)
        self.one, self.other = (
            torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)) for _ in range(2)
        )
        self.other[0].weight = self.one[0].weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(images).flatten(2).transpose(1, 2)
        tokens = tokens + self.one(tokens)
        return self.head((tokens + self.other(tokens)).mean(1))


def test_shared_weights_stay_shared(tmp_path: Path) -> None:
    """Dense and reduced, by a module or by a file of its weights; where that has two values it is two. Of other code it
    isn't versions that differ.
    """
    torch.manual_seed(0)
    net, images = Tied(), torch.randn(40, 3, 16, 16)
    calibration = corp_deploy.calibrate(net, images, tmp_path / "m.safetensors")
    reduced = corp_deploy.reduce(net, calibration, tmp_path / "r", mlp=0.5, align={"mlp": 8})
    assert net.one[0].weight is net.other[0].weight
    again = corp_deploy.load(corp_deploy.Source(reduced.path, module=Tied()))
    torch.testing.assert_close(again(images), reduced.model(images), rtol=0, atol=0)
    halved = 16 * 16 + 2 * (16 + 16 * 16)
    assert parameters(reduced.model) == parameters(again) == parameters(net) - halved
    state = net.state_dict()
    for apart in (0, 512):
        state["other.0.weight"] = state["other.0.weight"] + apart
        load_weights(own := Tied(), state, where=tmp_path)
        assert parameters(own) == parameters(net) + apart
        torch.testing.assert_close(own.state_dict(), state, rtol=0, atol=0)
    corp_deploy.export(reduced, tmp_path / "m.onnx")
    assert corp_deploy.verify(net, reduced, images, batches=(4,), max_error=0.3).verdict == "PASS"
    other = Tied()
    other.other[1] = torch.nn.Softmax(-1)
    with pytest.raises(corp_deploy.BadInput, match=r"now gives another program: its code or arguments changed"):
        corp_deploy.load(corp_deploy.Source(reduced.path, module=other))


def test_arguments_of_a_timm_module_are_inferred(tmp_path: Path) -> None:
    """Its directory needs nothing beside it; what it does not show may be said, and what is said has to hold."""
    torch.manual_seed(0)
    shown: dict[str, Any] = {"depth": 2, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8, "init_values": 1.0}
    net = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, **shown)
    images = torch.randn(40, 3, 32, 32)
    calibration = corp_deploy.calibrate(net, images, tmp_path / "m.safetensors")
    reduced = corp_deploy.reduce(net, calibration, tmp_path / "r", mlp=0.0)
    assert reduced.module is None
    torch.testing.assert_close(corp_deploy.load(reduced)(images), net.eval()(images), rtol=1e-4, atol=1e-5)
    relu = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, act_layer="relu").eval()
    beside = corp_deploy.load(corp_deploy.Source(relu, kwargs={"act_layer": "relu"}))
    torch.testing.assert_close(beside(images), relu(images), rtol=1e-4, atol=1e-5)
    with pytest.raises(corp_deploy.BadInput, match=r"kwargs \"\{'depth': 3\}\" don't make this module: .*missing"):
        corp_deploy.load(corp_deploy.Source(relu, kwargs={"depth": 3}))
    with pytest.raises(corp_deploy.BadInput, match="a module in memory, which has its own weights; leave weights away"):
        corp_deploy.load(corp_deploy.Source(relu, weights="w.safetensors"))


def test_unrunnable_module_explains_what_to_declare(tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    with pytest.raises(
        corp_deploy.BadInput, match=r"corp_deploy\.Source\(MODULE, kwargs=\{'input_size': \(3, 32, 32\)"
    ):
        corp_deploy.calibrate(torch.nn.Linear(7, 2), torch.randn(2, 3, 32, 32), out)
    broken = Net()
    torch.nn.init.constant_(broken.head.weight, torch.nan)
    rejects(r"the module: NaN or Inf in head\.weight", corp_deploy.calibrate, broken, torch.randn(2, 3, 32, 32), out)
    assert not out.exists()


def _bad_calls(home: Path, out: Path) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """A function, its arguments and its options."""
    dense, moments, images = home / "dense", home / "m.safetensors", home / "images.npy"
    unknown, vit = out / "code.py", "vit_tiny_patch16_224"
    unknown.write_text("def build():\n    return 1\n")
    reduce: list[dict[str, Any]] = [
        {}, {"macs": 0.5}, {"macs": 0.5, "params": 0.5, "inputs": images}, {"latency": 0.5},
        {"within": "error 1e-9", "inputs": images}, {"heads": "auto"}, {"mlp": 1.5}, {"conv": 0.5}, {"residual": 0.5},
        {"mlp": 0.5, "held_out": moments, "closed_loop": True, "inputs": images}, {"mlp": 0.5, "reads": "all"},
        {"mlp": 0.5, "allow_partial": False, "preset": "grail", "attn": 0.5}, {"mlp": 0.5, "preset": "fold"},
        {"mlp": 0.5, "merge_tokens": "auto"}, {"mlp": 0.5, "save_as": "hf"}, {"mlp": 0.5, "select": {"conv": "obs"}},
        {"macs": 0.3, "inputs": images, "most_cut": 0.2}, {"mlp": 0.5, "attn": 0.5, "preset": "corp"},
    ]  # fmt: skip
    models: list[Any] = [
        vit, "hf:nowhere", "torchvision:resnet18", f"module:{unknown}:build", out / "nowhere",
        corp_deploy.Source(f"module:{unknown}:build", trust_code=True), corp_deploy.Source(dense, weights=moments),
        corp_deploy.Source(dense, outputs=["nothing1"]),
        corp_deploy.Source(vit, weights=home / "dense" / "model.safetensors", ema=True), torch.nn.Linear(2, 2),
    ]  # fmt: skip
    calibrate: list[dict[str, Any]] = [
        {"attn": [0.5]}, {"attention_system": True, "attention": False}, {"hold_out": 24}, {"patch_memory": -1},
        {"groups": "image", "hold_out": 99}, {"merge_how": "drop", "merge_tokens": "auto"}, {"sites": ["none"]},
    ]  # fmt: skip
    return [
        *(("reduce", (dense, moments, out / "r"), options) for options in reduce),
        *(("load", (model,), {}) for model in models),
        *(("calibrate", (dense, images, out / "m.safetensors"), options) for options in calibrate),
        ("calibrate", (dense, np.zeros((2, 3, 5, 5), np.float32), out / "m.safetensors"), {}),
        ("verify", (dense, home / "reduced", images), {"min_agreement": 2}),
        ("verify", (dense, home / "model.onnx", images), {"labels": np.arange(3)}),
        ("bench", (home / "dense", home / "reduced"), {"streams": 2, "flush_l2": True}),
        ("export", (dense, out / "x.onnx"), {"precision": "int8"}),
        ("sites", (Net(),), {"inputs": (3, 32, 32)}),
        ("Source", (vit,), {"mean": "three"}),
        ("ReduceOptions", (), {"mlp": 0.5, "macs": 0.5}),
    ]


@pytest.mark.parametrize("third", range(3))
def test_python_messages_name_parameters_not_options(home: Path, tmp_path: Path, third: int) -> None:
    """Each bad call raises, and says parameters."""
    for name, arguments, options in _bad_calls(home, tmp_path)[third::3]:
        with pytest.raises((corp_deploy.BadInput, corp_deploy.Missing)) as refused:
            getattr(corp_deploy, name)(*arguments, **options)
        assert not re.search(r"--[a-z]", str(refused.value)), (name, options, str(refused.value))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("give --macs 0.6, --heads auto, --allow-partial;", "give `macs=0.6`, `heads='auto'`, `allow_partial=True`;"),
        ("--within 'error 0.05' or --polish", "`within='error 0.05'` or `polish`"),
        ("calibrate --attention-system first", "`calibrate(attention_system=True)` first"),
        ("give --images, or --text for a text encoder", "give `inputs` for a text encoder"),
        ("give --weights FILE or --no-ema", "give `Source(weights=FILE)` or `Source(ema=False)`"),
        ("take --workers 2, --trust-code", "take the commands' option 'workers' 2, `trust_code=True`"),
    ],
)
def test_options_in_messages_become_parameters(message: str, words: str) -> None:
    assert message_in_python(message, ReduceOptions, parameters=("trust_code",)) == words
