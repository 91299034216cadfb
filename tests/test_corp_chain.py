"""What a proof costs: forward passes, copies and memory of the images; products in float16 by way of float32."""

from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families.architecture import Architecture
from corp_deploy.families.traced_model import traced
from corp_deploy.invocation.running import RunOptions
from corp_deploy.proof import chain
from corp_deploy.proof.candidates import Candidate, candidate_from_path
from corp_deploy.proof.chain import Proof, prove
from corp_deploy.proof.half_products import HalfProducts
from corp_deploy.proof.inputs import ProofInputs, inputs_from_set, random_inputs
from corp_deploy.proof.link_rules import ParityLimits
from corp_deploy.proof.record import save_proof
from corp_deploy.proof.speed import measure
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from export.graph.to_onnx import onnx_from_model
from export.graph.to_onnx import save as save_onnx
from ground.errors import BadInput
from ground.feeds import Feeds, batch_size
from ground.ports import OutputPort, Port
from ground.precision import FLOAT32
from perf.parity.parity import load_parity
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner
from perf.timing.laps import Plan
from tests import tiny

IMAGES = 64


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, the second one's graph, and images."""
    folder = tmp_path_factory.mktemp("chain")
    dense = tiny.checkpoint()
    save(dense, folder / "dense")
    with torch.no_grad():
        for parameter in dense.model.parameters():
            parameter.mul_(1.001)
    save(dense, folder / "reduced")
    export_checkpoint(dense, folder / "fp32.onnx", precision="fp32")
    np.save(folder / "images.npy", tiny.images(IMAGES))
    return folder


@pytest.mark.slow("graph")
def test_a_proof_runs_at_most_twice_the_images_it_judges(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, int]] = []
    for runner in (ModuleRunner, OnnxRunner):
        monkeypatch.setattr(runner, "__call__", counted(runner, runs))
    dense = load_checkpoint(home / "dense")
    given = inputs_from_set(images_for_model(dense.model, home / "images.npy"))
    export_checkpoint(load_checkpoint(home / "reduced"), home / "fp16.onnx", precision="fp16")
    candidates = [candidate_from_path(home / name) for name in ("reduced", "fp32.onnx", "fp16.onnx")]
    proof = prove(dense, candidates, given, batches=(1, 7, 32), limits=ParityLimits(max_error=1.0))
    assert proof.parity.verdict == "PASS"
    assert IMAGES * 4 < sum(count for _, count in runs) <= 2 * IMAGES * 4
    for each in proof.parity.links:
        assert [(row.batch, row.images) for row in each.batches] == [(1, 4), (7, 7), (32, None)]
        assert each.measures.images == IMAGES


def counted(runner: type, runs: list[tuple[str, int]]) -> Any:
    call = runner.__call__

    def __call__(self: Any, feeds: Feeds) -> Any:
        runs.append((runner.__name__, batch_size(feeds)))
        return call(self, feeds)

    return __call__


@pytest.mark.slow("graph")
def test_one_candidate_is_open_at_a_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    for runner in (ModuleRunner, OnnxRunner):
        enter, leave = runner.__enter__, runner.__exit__

        def entered(self: Any, enter: Any = enter) -> Any:
            opened.append(len(opened) - 2 * sum(each < 0 for each in opened))
            return enter(self)

        def left(self: Any, *error: Any, leave: Any = leave) -> None:
            opened.append(-1)
            leave(self, *error)

        monkeypatch.setattr(runner, "__enter__", entered)
        monkeypatch.setattr(runner, "__exit__", left)
    dense = load_checkpoint(home / "dense")
    given = inputs_from_set(images_for_model(dense.model, home / "images.npy"))
    prove(dense, [candidate_from_path(home / "reduced")], given, batches=(8,), limits=ParityLimits())
    assert opened == [0, -1, 0, -1]


def test_images_are_held_in_a_file(home: Path) -> None:
    dense = load_checkpoint(home / "dense")
    source = images_for_model(dense.model, home / "images.npy")
    given = inputs_from_set(source)
    assert isinstance(given.feeds["images"], np.memmap)
    np.testing.assert_array_equal(given.feeds["images"], np.concatenate([batch.numpy() for batch in source.batches(5)]))


def test_blocks_are_looked_at_only_when_a_link_fails(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(chain, "located", lambda name, *_: asked.append(name))
    dense = load_checkpoint(home / "dense")
    given = inputs_from_set(images_for_model(dense.model, home / "images.npy", samples=8))
    steps = [candidate_from_path(home / name) for name in ("reduced", "fp32.onnx")]
    prove(dense, steps, given, batches=(8,), limits=ParityLimits())
    assert asked == []
    prove(dense, steps, given, batches=(8,), limits=ParityLimits(max_error=1e-9))
    assert asked == ["reduced"]


def test_a_module_that_runs_as_it_is_is_not_copied() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4)).eval()
    feeds = {"images": tiny.images(2)}
    with ModuleRunner(module) as runner:
        expected = runner(feeds)["logits"]
        assert runner._ready is module
    module.train()
    with ModuleRunner(module) as runner:
        assert runner._ready is not module
        np.testing.assert_array_equal(runner(feeds)["logits"], expected)
    assert module.training
    with ModuleRunner(module.eval(), precision="bf16") as runner:
        assert runner._ready is not module
    assert all(parameter.requires_grad for parameter in module.parameters())


LAYERS = {
    "linear": (nn.Linear(300, 7), (5, 300)),
    "convolution": (nn.Conv2d(6, 4, 3, padding=1, groups=2), (2, 6, 5, 5)),
    "attention": (nn.MultiheadAttention(12, 3, batch_first=True), (2, 5, 12)),
}


def answered(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_what_comes_out_is_the_exact_product_rounded(name: str) -> None:
    layer, shape = LAYERS[name]
    half, x = layer.half().eval(), torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    with HalfProducts():  # type: ignore[no-untyped-call]
        given = answered(half, x)
    exact = answered(half.double(), x.double())
    assert given.dtype == torch.float16
    torch.testing.assert_close(given.double(), exact, rtol=2e-3, atol=2e-3 if name == "attention" else 1e-3)


@torch.no_grad()
def test_a_single_product_is_rounded_once() -> None:
    a, b = (torch.randn(9, 9, generator=torch.Generator().manual_seed(seed)).half() for seed in (0, 1))
    with HalfProducts():  # type: ignore[no-untyped-call]
        given = a @ b
    assert torch.equal(given, (a.float() @ b.float()).half())
    assert (given.double() - a.double() @ b.double()).abs().max() <= 2.0**-10 * (a.double() @ b.double()).abs().max()


@torch.no_grad()
def test_other_types_are_left_alone() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    with HalfProducts():  # type: ignore[no-untyped-call]
        assert torch.equal(x @ x.T, torch.mm(x, x.T))
        assert (x.bfloat16() @ x.T.bfloat16()).dtype == torch.bfloat16


@torch.no_grad()
def test_what_overflows_float16_is_infinite_as_it_is_there() -> None:
    big = torch.full((2, 64), 200.0).half()
    with HalfProducts():  # type: ignore[no-untyped-call]
        assert torch.isinf(big @ big.T).all()


# The parity chain on models that are no image classifiers: one of two inputs of whole numbers and two outputs, and a

WORDS, LENGTH, WIDTH, CLASSES, TEXTS = 30, 6, 16, 5, 20
INPUTS = tuple(Port(name=name, shape=(LENGTH,), dtype="int64") for name in ("input_ids", "attention_mask"))
OUTPUTS = (OutputPort(name="embedding", role="embedding"), OutputPort(name="scores", role="token logits"))


class Tagger(nn.Module):
    """Scores every token and embeds the text: the mean of its own tokens."""

    inputs: ClassVar = {name: torch.ones(LENGTH, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    outputs: ClassVar = {port.name: port.role for port in OUTPUTS}

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.mix(self.table(input_ids)))
        kept = attention_mask.unsqueeze(-1).to(x.dtype)
        return (x * kept).sum(dim=1) / kept.sum(dim=1), self.head(x)


def checkpoint(model: nn.Module) -> Checkpoint:
    return Checkpoint(model=model.eval(), architecture=Architecture(name="tagger", kwargs={}), lineage={})


def torch_step(model: nn.Module, name: str = "reduced") -> Candidate:
    return Candidate(
        label=f"{name} torch fp32", name=name, form="torch", path=Path(name), float_type=FLOAT32,
        checkpoint=checkpoint(model),
    )  # fmt: skip


def texts() -> ProofInputs:
    rng = np.random.default_rng(0)
    mask = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (TEXTS, 1))).astype(np.int64)
    feeds = {"attention_mask": mask, "input_ids": rng.integers(0, WORDS, (TEXTS, LENGTH))}
    return ProofInputs(feeds=feeds, digest="sha256:00", kind="documents")


@pytest.fixture
def tagger() -> nn.Module:
    return traced(Tagger(0).eval(), Architecture(name="tagger", family="module"))


def changed(model: nn.Module, module: str, factor: float) -> nn.Module:
    other = deepcopy(model)
    with torch.no_grad():
        other.get_submodule(module).weight.mul_(factor)  # type: ignore[operator]
    return other


def graph(model: nn.Module, path: Path, precision: str) -> Candidate:
    save_onnx(onnx_from_model(model, INPUTS, OUTPUTS, precision=precision, metadata={}), path)
    return candidate_from_path(path)


def proof(dense: nn.Module, *steps: Candidate, **limits: Any) -> Proof:
    return prove(checkpoint(dense), steps, texts(), batches=(1, 8), limits=ParityLimits(**limits))


def test_two_inputs_and_two_outputs_go_down_the_whole_chain(tagger: nn.Module, tmp_path: Path) -> None:
    reduced = changed(tagger, "mix", 1.02)
    graphs = [graph(reduced, tmp_path / f"m.{precision}.onnx", precision) for precision in ("fp32", "fp16")]
    found = proof(tagger, torch_step(reduced), *graphs, max_error=0.2, min_agreement=0.5)
    parity = found.parity
    assert parity.verdict == "PASS", parity.line
    assert parity.line.endswith("on 20 documents")
    names = ("reduced", graphs[0].name, graphs[1].name, "whole")
    assert [(each.name, each.role) for each in parity.links] == [
        (f"{name} {port.name}", port.role) for name in names for port in OUTPUTS
    ]
    assert {each.test for each in parity.structure} >= {"batch-slot", "permutation", "finite", "constant", "batch-size"}
    assert "extremes" not in {each.test for each in parity.structure}
    assert set(found.figures) >= {"embedding.reduced torch fp32.agrees", "scores.reduced torch fp32.token_agreement"}
    save_proof(found, tmp_path / "parity.json")
    assert load_parity(tmp_path / "parity.json").links == parity.links


@pytest.mark.parametrize(("module", "failing"), [("head", ["scores"]), ("mix", ["embedding", "scores"])])
def test_a_fault_fails_the_outputs_that_it_reaches(
    tagger: nn.Module, tmp_path: Path, module: str, failing: list[str]
) -> None:
    faulty = graph(changed(tagger, module, 1.01), tmp_path / "m.onnx", "fp32")
    links = proof(tagger, torch_step(tagger, "same"), faulty).parity.links
    assert [each.output for each in links if each.kind == "exact" and each.status == "FAIL"] == failing


def test_a_step_of_other_outputs_is_refused(tagger: nn.Module, tmp_path: Path) -> None:
    class Alone(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            both: tuple[Tensor, Tensor] = tagger(input_ids, attention_mask)
            return both[0]

    save_onnx(onnx_from_model(Alone(), INPUTS, OUTPUTS[:1], precision="fp32", metadata={}), tmp_path / "m.onnx")
    with pytest.raises(BadInput, match="gives embedding, expected embedding, scores as the dense model does"):
        proof(tagger, candidate_from_path(tmp_path / "m.onnx"))


def test_inputs_that_miss_one_are_refused_by_name(tagger: nn.Module) -> None:
    given = texts()
    missing = ProofInputs(feeds={"input_ids": given.feeds["input_ids"]}, digest="")
    with pytest.raises(BadInput, match=r"takes attention_mask \[B, 6\] as int64, which is missing"):
        prove(checkpoint(tagger), [torch_step(tagger)], missing, batches=(4,), limits=ParityLimits())


def test_random_whole_numbers_are_not_made_up(tagger: nn.Module) -> None:
    with pytest.raises(BadInput, match=r"takes input_ids \(int64\), attention_mask \(int64\); give real ones"):
        random_inputs(checkpoint(tagger), 4, 0)


def test_graphs_of_several_inputs_are_timed(tagger: nn.Module, tmp_path: Path) -> None:
    paths = [graph(tagger, tmp_path / f"{name}.onnx", "fp32").path for name in ("dense", "reduced")]
    plan = Plan(block_ms=1, min_rounds=6, max_rounds=6, noise_rounds=0, warm_up_min_s=0.0, warm_up_limit_s=0.2)
    record = measure(*paths, batches=[2], plan=plan, running=RunOptions(threads=1))
    assert [trial.status for trial in record.rows[0].trials.values()] == ["ok", "ok"]
    assert not any("answers taken inside the timed run" in text for text in record.warnings)


@pytest.mark.slow("graph")
def test_a_transformer_without_a_classifier_is_compared_by_angle(tmp_path: Path) -> None:
    dense = tiny.checkpoint(num_classes=0)
    export_checkpoint(dense, tmp_path / "m.onnx", precision="fp32")
    feeds = {"images": tiny.images(8)}
    steps = [torch_step(dense.model), candidate_from_path(tmp_path / "m.onnx")]
    limits = ParityLimits(min_agreement=0.67)
    parity = prove(dense, steps, ProofInputs(feeds=feeds, digest=""), batches=(4,), limits=limits).parity
    assert parity.verdict == "PASS", parity.line
    assert {each.role for each in parity.links} == {"embedding"}
    assert parity.links[0].name == "reduced"
    words = "agreement of nearest neighbours 100 % (67.56 % to 100 % at 95 % confidence), limit 67 %"
    assert words in parity.links[0].reason
    assert "top1_agreement" not in str(parity.to_json())


def test_labels_of_a_model_without_classes_are_refused() -> None:
    dense = tiny.checkpoint(num_classes=0)
    given = ProofInputs(feeds={"images": tiny.images(4)}, digest="", labels=np.zeros(4, dtype=np.int64))
    with pytest.raises(BadInput, match=r"tells no classes apart \(logits is embedding\)"):
        prove(dense, [torch_step(dense.model)], given, batches=(4,), limits=ParityLimits())


def test_two_images_have_no_nearest_neighbour_to_agree_on() -> None:
    dense = tiny.checkpoint(num_classes=0)
    given = ProofInputs(feeds={"images": tiny.images(2)}, digest="")
    with pytest.raises(BadInput, match="nearest neighbours need 3 inputs, got 2"):
        prove(dense, [torch_step(dense.model)], given, batches=(2,), limits=ParityLimits(min_agreement=0.9))
