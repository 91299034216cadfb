"""Modules with any inputs and outputs are calibrated, reduced, exported and verified by the commands."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from calib.inputs import as_tuple
from calib.moments import ChannelMoments
from corp_deploy.families.family import output_ports, sites_of
from corp_deploy.families.module_facts import facts_of_module
from corp_deploy.families.traced_model import trace_model
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.spec.trusted_code import trusting_code
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.input_sets import arrays_for_model
from ground.ports import Role
from tests.command import invoked
from tests.refusals import rejects

D, TOKENS, WORDS = 32, 12, 50
SOURCE = """
from tests.test_traced_inputs import MODULES

def make(name):
    return MODULES[name]()
"""


class Block(nn.Module):
    """A transformer block that doesn't attend to padding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor, there: Tensor | None = None) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        mask = None if there is None else there.bool()[:, None, None]
        heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class Encoder(nn.Module):
    """A model from ids and their mask to a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Parameter(0.1 * torch.randn(TOKENS, D))
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(D, 5)
        self.inputs = dict.fromkeys(("ids", "attention_mask"), torch.zeros(TOKENS, dtype=torch.int64))

    def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor | None]:
        x = self.words(ids) + self.places
        for block in self.blocks:
            x = block(x, attention_mask)
        share = attention_mask / attention_mask.sum(1, keepdim=True)
        pooled = (x * share[..., None]).sum(1)
        return {"logits": self.head(pooled), "embedding": pooled, "states": None}


@dataclass
class Scored:
    scores: Tensor
    features: Tensor
    kept: Tensor


class Towers(nn.Module):
    """A model from vectors and images to a dataclass, two of whose fields are outputs; `meta` is a name of fx.Graph."""

    outputs: Mapping[str, Role] = {"features": "embedding", "scores": "logits"}

    def __init__(self) -> None:
        super().__init__()
        self.meta = nn.Sequential(nn.Linear(9, 48), nn.GELU(), nn.Linear(48, D))
        self.right = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, D, 3, 2, 1))
        self.score = nn.Linear(D, 4)
        self.inputs = {"pixels": (3, 16, 16), "vector": (9,)}

    def forward(self, vector: Tensor, pixels: Tensor) -> Scored:
        joined = torch.tanh(self.meta(vector) + self.right(pixels).mean((2, 3)))
        return Scored(scores=self.score(joined), features=joined, kept=joined.argmax(-1))


class Windows(nn.Module):
    """A model from a series of vectors to a tuple with declared names."""

    inputs: Mapping[str, Any] = {"series": (TOKENS, 6)}
    outputs = ("tokens", "pooled")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, D), Block(), nn.Linear(D, 3)

    def forward(self, series: Tensor) -> tuple[Tensor, Tensor]:
        x = self.block(self.first(series))
        return self.last(x), x.mean(1)


MODULES: Mapping[str, type[nn.Module]] = {kind.__name__: kind for kind in (Encoder, Towers, Windows)}


def arrays(name: str, count: int, seed: int) -> dict[str, NDArray[Any]]:
    """Draw arrays for the inputs of a module, by name."""
    generator = np.random.default_rng(seed)
    if name == "Encoder":
        lengths = generator.integers(3, TOKENS, count)
        mask = (np.arange(TOKENS) < lengths[:, None]).astype(np.int64)
        return {"ids": generator.integers(1, WORDS, (count, TOKENS)) * mask, "attention_mask": mask}
    inputs: Any = MODULES[name]().inputs
    return {key: generator.standard_normal((count, *shape), dtype=np.float32) for key, shape in inputs.items()}


CHAIN: Mapping[str, tuple[tuple[object, ...], list[str]]] = {
    "Encoder": (
        ("--mlp", 0.5, "--attn", 0.5, "--heads", "square", "--align", "mlp=4,head=4"),
        ["logits", "embedding"],
    ),
    "Towers": (
        ("--mlp", 0.5, "--conv", 0.5, "--align", "mlp=4,conv=4"),
        ["features", "scores"],
    ),
    "Windows": (("--mlp", 0.5, "--align", "mlp=4"), ["tokens", "pooled"]),
}
"""Options of reduce and names of outputs, by module."""


LIBRARIES: Mapping[str, tuple[dict[str, Any], tuple[object, ...], str]] = {
    "MPNetModel": (
        {"num_hidden_layers": 1, "max_position_embeddings": 18, "vocab_size": WORDS},
        ("--mlp", 0.5, "--attn", 0.5, "--heads", "square", "--align", "mlp=4,head=4"),
        '{"length": 16}',
    ),
    "SwinForImageClassification": (
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1], "num_heads": [1], "window_size": 4},
        ("--mlp", 0.5, "--align", "mlp=4"),
        "{}",
    ),
}
"""Configurations of transformers models, options of reduce and --model-kwargs."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(name: str, home: Path) -> tuple[str, ...]:
    """Write a module, its weights and arrays, and return the words that name it in commands."""
    (home / "own.py").write_text(SOURCE)
    for file, seed in (("calibration", 1), ("held-out", 2)):
        save_arrays(arrays(name, 48, seed), home / f"{file}.safetensors")
    torch.manual_seed(0)
    save_file(MODULES[name]().state_dict(), home / "weights.safetensors")
    kwargs = json.dumps({"name": name})
    return ("module:own.py:make", "--model-kwargs", kwargs, "--weights", "weights.safetensors", "--trust-code")


def assert_graph_says_the_same(path: Path, feeds: Mapping[str, NDArray[Any]], outputs: list[str]) -> None:
    """Assert that a graph gives the outputs of the checkpoint beside it."""
    session = onnxruntime.InferenceSession(path)
    assert [each.name for each in session.get_inputs()] == list(feeds)
    with trusting_code(True), torch.inference_mode():
        expected = as_tuple(load_checkpoint(path.parent).model(*map(torch.from_numpy, feeds.values())))
    for one, other in zip(session.run(outputs, dict(feeds)), expected, strict=True):
        assert np.abs(one - other.numpy()).max() <= 1e-4 * other.abs().max()


def run_whole_chain(model: tuple[str, ...], inputs: str, asked: tuple[object, ...]) -> None:
    """Calibrate, reduce, export and verify a model with the arrays in the directory."""
    trusted = model[-1:] if model[-1] == "--trust-code" else ()
    invoked("calibrate", "--model", *model, inputs, "calibration.safetensors", "-o", "m.safetensors", "-q")
    invoked("reduce", "--model", *model, "--moments", "m.safetensors", *asked, "-o", "reduced", "-q")
    invoked("export", "--model", "reduced", *trusted, "--precision", "fp32,fp16", "-o", "reduced/model.onnx", "-q")
    chain = ("reduced", "reduced/model.onnx", "reduced/model.fp16.onnx")
    judged = (inputs, "held-out.safetensors", "--batch", "1,4", "--max-error", 2.0, "-o", "parity.json", "-q")
    invoked("verify", model[0], *chain, *model[1:], *judged)
    assert {link["status"] for link in json.loads(Path("parity.json").read_text())["links"]} == {"PASS"}


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", CHAIN)
def test_any_inputs_and_outputs_pass_the_whole_chain(name: str, home: Path) -> None:
    asked, outputs = CHAIN[name]
    run_whole_chain(written(name, home), "--arrays", asked)
    assert_graph_says_the_same(home / "reduced/model.onnx", arrays(name, 3, 3), outputs)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", LIBRARIES)
def test_transformers_encoders_pass_the_whole_chain(name: str, home: Path) -> None:
    values, asked, kwargs = LIBRARIES[name]
    kind = getattr(transformers, name)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    dense = kind(kind.config_class(**(values if "Swin" in name else sizes | values))).eval()
    dense.save_pretrained(home / "dense")
    for file, seed in (("calibration", 1), ("held-out", 2)):
        generator = np.random.default_rng(seed)
        given: dict[str, NDArray[Any]]
        if name == "MPNetModel":
            mask = np.ones((32, 16), np.int64)
            mask[:16, 9:] = 0
            given = {"input_ids": generator.integers(2, WORDS, (32, 16)) * mask + (1 - mask), "attention_mask": mask}
        else:
            given = {"images": generator.standard_normal((32, 3, 16, 16), dtype=np.float32)}
        save_arrays(given, home / f"{file}.safetensors")
    inputs = "--images" if "images" in given else "--arrays"
    words = ("hf:dense", "--model-kwargs", kwargs)
    loaded = load_dense("hf:dense", weights=None, kwargs=json.loads(kwargs)).model
    with torch.inference_mode():
        tensors = [torch.from_numpy(each[:3]) for each in given.values()]
        assert torch.allclose(as_tuple(loaded(*tensors))[0], dense(*tensors)[0], atol=1e-5)
    run_whole_chain(words, inputs, asked)
    outputs = [port.name for port in output_ports(load_checkpoint(home / "reduced").model)]
    assert_graph_says_the_same(home / "reduced/model.onnx", {key: each[:3] for key, each in given.items()}, outputs)


def traced_module(name: str) -> Checkpoint:
    torch.manual_seed(0)
    architecture = Architecture(name=name, family="module")
    return Checkpoint(model=trace_model(MODULES[name](), architecture), architecture=architecture, lineage={})


def test_padding_is_excluded_from_the_statistics(tmp_path: Path) -> None:
    given = arrays("Encoder", 20, 1)
    save_arrays(given, tmp_path / "arrays.safetensors")
    dense = traced_module("Encoder")
    moments = calibrate(dense, arrays_for_model(dense.model, tmp_path / "arrays.safetensors"), batch_size=7)
    heard: list[Tensor] = []
    dense.model.get_submodule("blocks.1.fc2").register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    with torch.inference_mode():
        dense.model(*map(torch.from_numpy, given.values()))
    there = given["attention_mask"].astype(bool)
    expected_FF = sum(np.outer(token, token) for token in heard[0].double().numpy()[there])
    statistics = moments.sites["blocks.1.fc2"]
    assert isinstance(statistics, ChannelMoments)
    assert statistics.tokens == there.sum()
    np.testing.assert_allclose(statistics.gram_FF.numpy(), expected_FF, rtol=1e-4, atol=1e-3)


def test_token_merging_is_refused_for_padded_inputs(tmp_path: Path) -> None:
    save_arrays(arrays("Encoder", 20, 1), tmp_path / "arrays.safetensors")
    dense = traced_module("Encoder")
    inputs = arrays_for_model(dense.model, tmp_path / "arrays.safetensors")
    moments, merging = calibrate(dense, inputs, batch_size=7), method_from_preset("fold", heads_sparsity=0.5)
    rejects("these inputs have padding", reduce, dense.model, moments, merging, images=inputs)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"ids": None}, "takes ids [B, 12] as int64, which is missing"),
        ({"ids": np.full((4, TOKENS), WORDS)}, f"ids: numbers from {WORDS} to {WORDS}, expected 0 to {WORDS - 1}"),
        ({"ids": np.zeros((4, TOKENS), np.float32)}, "takes ids as int64, got float32"),
        ({"more": np.zeros(4)}, "takes no more, only ids, attention_mask"),
    ],
)
def test_arrays_are_checked_against_the_inputs(
    changed: Mapping[str, NDArray[Any] | None], reason: str, tmp_path: Path
) -> None:
    every = {name: each for name, each in {**arrays("Encoder", 4, 1), **changed}.items() if each is not None}
    np.savez(tmp_path / "arrays.npz", **every)  # type: ignore[arg-type]
    rejects(re.escape(reason), arrays_for_model, traced_module("Encoder").model, tmp_path / "arrays.npz")


class _Odd(nn.Linear):
    """A model from two inputs of five numbers to the output that `gives` names."""

    def __init__(self, gives: str, **said: Any) -> None:
        super().__init__(5, 3)
        self.gives = gives
        for name, value in said.items():
            setattr(self, name, value)

    def forward(self, one: Tensor, two: Tensor) -> Any:  # type: ignore[override]
        x = super().forward(one + two)
        if self.gives == "by value":
            return x if x.sum() > 0 else -x
        return {"a scalar": (x, x.mean()), "whole": x.argmax(-1), "batch by batch": x @ x.T, "x": x}[self.gives]


class _Named(nn.Module):
    """A model with keyword-only inputs, an output with the name of an input, and half-precision weights."""

    inputs: Mapping[str, Any] = {"a": (5,), "b": (5,)}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3).half()

    def forward(self, *, b: Tensor, a: Tensor) -> dict[str, Tensor]:
        return {"a": self.layer(a), "apart": self.layer(a) - self.layer(b)}


def test_inputs_are_passed_by_name_and_outputs_are_named() -> None:
    model = trace_model(_Named().eval(), Architecture(name="named", family="module"))
    a, b = torch.randn(2, 3, 5).unbind()
    with torch.no_grad():
        (given, apart), one, other = model(a, b), *(_linear(model, each) for each in (a, b))
    assert [port.name for port in output_ports(model)] == ["output_a", "apart"]
    torch.testing.assert_close((given, apart), (one, one - other))
    assert not sites_of(model).every


def _linear(model: nn.Module, x: Tensor) -> Tensor:
    return x @ model.get_parameter("layer.weight").T + model.get_parameter("layer.bias")


PAIR = {"one": (5,), "two": (5,)}
REFUSED: list[tuple[nn.Module, str]] = [
    (_Odd("x"), "its forward takes one, two; declare its `inputs`"),
    (_Odd("x", inputs={"one": (5,)}), "forward(one, two) needs two too"),
    (_Odd("x", inputs={**PAIR, "three": (5,)}), "has no parameter 'three'"),
    (_Odd("x", inputs={"one": (5,), "two": 5}), "`inputs`: two: got 5, expected one size or more"),
    (_Odd("x", inputs={"one": (5,), "two": (4,)}), "_Odd can't be run on one [5] float32, two [4] float32: "),
    (_Odd("by value", inputs=PAIR), "control flow on values can't be traced"),
    (_Odd("a scalar", inputs=PAIR), "its output output_1 is float32 []"),
    (_Odd("whole", inputs=PAIR), "its output logits is int64 [2]"),
    (_Odd("batch by batch", inputs=PAIR), "[2, 2] for a batch of 2 and [3, 3] for one of 3"),
    (_Odd("x", inputs=PAIR, outputs={"x": "score"}), "`outputs` have the role 'score', expected one of logits"),
    (_Odd("x", inputs=PAIR, outputs={"x": "logits", "y": "logits"}), "give these names, or as many names of your own"),
]


@pytest.mark.parametrize(("model", "reason"), REFUSED)
def test_undeclared_inputs_are_refused_with_the_declaration_to_add(model: nn.Module, reason: str) -> None:
    rejects(re.escape(reason), facts_of_module, model, Preprocessing())


def test_list_of_other_objects_declares_no_outputs() -> None:
    facts = facts_of_module(_Odd("x", inputs=PAIR, outputs=[{}]), Preprocessing())
    assert [port.name for port in facts.outputs] == ["logits"]
