"""The parity chain: passes and copies, float16 products, text models, and images whose merges rounding decides."""

import copy
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.families.inspection import choice_margins, merge_margins
from corp_deploy.families.traced_model import trace_model
from corp_deploy.proof import chain
from corp_deploy.proof.candidates import Candidate, candidate_from_path
from corp_deploy.proof.chain import prove_chain
from corp_deploy.proof.limits import ParityLimits
from corp_deploy.proof.model_inputs import draw_random_inputs, inputs_from_set
from corp_deploy.proof.outcome import Proof, save_proof
from corp_deploy.proof.own_noise import HalfProducts
from corp_deploy.proof.proof_inputs import ProofInputs
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import Merging
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.steps import Merge, StreamState
from corp_deploy.traced.models.token_merging import TokenMerge
from export.graph.to_onnx import onnx_from_model, save_onnx
from ground.errors import BadInput
from ground.feeds import Feeds, batch_size
from ground.precision import FLOAT16, FLOAT32
from perf.parity.link import Link, measure_link
from perf.parity.parity import ImageSet, Parity, load_parity, parity_from_value
from perf.parity.tolerance import MOST_APART, SPREAD, Choices, exact_tolerance
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner
from tests import tiny
from tests.doubles import some
from tests.export_text import EMBEDDING, INPUTS, TOKEN_LOGITS, TextEncoder, sentences

IMAGES = 64


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dense and a reduced model, the reduced model's graph and images."""
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


@pytest.fixture
def dense(home: Path) -> Checkpoint:
    return load_checkpoint(home / "dense")


@pytest.fixture
def inputs(home: Path, dense: Checkpoint) -> ProofInputs:
    return inputs_from_set(images_for_model(dense.model, home / "images.npy"))


@pytest.mark.slow("graph")
def test_proof_runs_at_most_twice_the_judged_images(
    home: Path, dense: Checkpoint, inputs: ProofInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    for runner in (ModuleRunner, OnnxRunner):

        def counted(self: Any, feeds: Feeds, call: Any = runner.__call__) -> Any:
            runs.append(batch_size(feeds))
            return call(self, feeds)

        monkeypatch.setattr(runner, "__call__", counted)
    export_checkpoint(load_checkpoint(home / "reduced"), home / "fp16.onnx", precision="fp16")
    candidates = [candidate_from_path(home / name) for name in ("reduced", "fp32.onnx", "fp16.onnx")]
    proof = prove_chain(dense, candidates, inputs, limits=ParityLimits(batches=(1, 7, 32), max_error=1.0))
    assert proof.parity.verdict == "PASS"
    assert IMAGES * 4 < sum(runs) <= 2 * IMAGES * 4
    for each in proof.parity.links:
        assert [(row.batch, row.images) for row in each.batches] == [(1, 4), (7, 7), (32, None)]
        assert each.measures.images == IMAGES


@pytest.mark.slow("graph")
def test_only_one_candidate_is_open_at_a_time(
    home: Path, dense: Checkpoint, inputs: ProofInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    enter, leave = ModuleRunner.__enter__, ModuleRunner.__exit__

    def entered(self: Any) -> Any:
        events.append("open")
        return enter(self)

    def left(self: Any, *error: Any) -> None:
        events.append("close")
        leave(self, *error)

    monkeypatch.setattr(ModuleRunner, "__enter__", entered)
    monkeypatch.setattr(ModuleRunner, "__exit__", left)
    prove_chain(dense, [candidate_from_path(home / "reduced")], inputs, limits=ParityLimits(batches=(8,)))
    assert events == ["open", "close"] * 2


def test_images_are_kept_in_a_file(home: Path, dense: Checkpoint, inputs: ProofInputs) -> None:
    source, kept = images_for_model(dense.model, home / "images.npy"), inputs.feeds["images"]
    assert isinstance(kept, np.memmap)
    np.testing.assert_array_equal(kept, np.concatenate([batch.numpy() for batch in source.batches(5)]))


def test_blocks_are_compared_only_if_a_link_fails(
    home: Path, dense: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(chain, "locate_fault_of_link", lambda name, *_: compared.append(name))
    few = inputs_from_set(images_for_model(dense.model, home / "images.npy", samples=8))
    steps = [candidate_from_path(home / name) for name in ("reduced", "fp32.onnx")]
    prove_chain(dense, steps, few, limits=ParityLimits(batches=(8,)))
    assert compared == []
    prove_chain(dense, steps, few, limits=ParityLimits(batches=(8,), max_error=1e-9))
    assert compared == ["reduced"]


def test_module_that_runs_unchanged_is_not_copied() -> None:
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


def output_of(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
    return out


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_rounded_product_equals_the_exact_product_rounded(name: str) -> None:
    layer, shape = LAYERS[name]
    half, x = layer.half().eval(), torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    with HalfProducts():  # type: ignore[no-untyped-call]
        found = output_of(half, x)
    exact = output_of(half.double(), x.double())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3 if name == "attention" else 1e-3)


@torch.no_grad()
def test_products_are_rounded_once_overflow_and_keep_other_types() -> None:
    a, b = (torch.randn(9, 9, generator=torch.Generator().manual_seed(seed)).half() for seed in (0, 1))
    x, big = torch.randn(3, 4, dtype=torch.float64), torch.full((2, 64), 200.0).half()
    with HalfProducts():  # type: ignore[no-untyped-call]
        found = a @ b
        assert torch.equal(x @ x.T, torch.mm(x, x.T))
        assert (x.bfloat16() @ x.T.bfloat16()).dtype == torch.bfloat16
        assert torch.isinf(big @ big.T).all()
    assert torch.equal(found, (a.float() @ b.float()).half())


# The parity chain on a text encoder, which has two integer inputs and two outputs, and on a model without a classifier.

OUTPUTS = (EMBEDDING, TOKEN_LOGITS)


def checkpoint_of(model: nn.Module) -> Checkpoint:
    return Checkpoint(model=model.eval(), architecture=Architecture(name="encoder", kwargs={}), lineage={})


def torch_step(model: nn.Module, name: str = "reduced") -> Candidate:
    return Candidate(
        label=f"{name} torch fp32", name=name, form="torch", path=Path(name), float_type=FLOAT32,
        checkpoint=checkpoint_of(model),
    )  # fmt: skip


def texts() -> ProofInputs:
    """Return sentences whose inputs are in another order than the model's."""
    return ProofInputs(feeds=dict(reversed(sentences(20).items())), digest="sha256:00", kind="documents")


@pytest.fixture
def encoder() -> nn.Module:
    model: Any = TextEncoder(words=True)
    model.inputs = {port.name: torch.ones(port.shape, dtype=torch.int64) for port in INPUTS}
    model.outputs = {port.name: port.role for port in OUTPUTS}
    return trace_model(model, Architecture(name="encoder", family="module"))


def scaled(model: nn.Module, module: str, factor: float) -> nn.Module:
    """Return a copy of the model in which the weight of one module is scaled."""
    other = deepcopy(model)
    with torch.no_grad():
        other.get_submodule(module).weight.mul_(factor)  # type: ignore[operator]
    return other


def graph(model: nn.Module, path: Path, precision: str) -> Candidate:
    save_onnx(onnx_from_model(model, INPUTS, OUTPUTS, precision=precision, metadata={}), path)
    return candidate_from_path(path)


def prove_on_texts(dense: nn.Module, *steps: Candidate, **limits: Any) -> Proof:
    return prove_chain(checkpoint_of(dense), steps, texts(), limits=ParityLimits(batches=(1, 8), **limits))


@pytest.mark.slow("graph")
def test_two_inputs_and_outputs_pass_the_whole_chain(encoder: nn.Module, tmp_path: Path) -> None:
    reduced = scaled(encoder, "qkv", 1.02)
    graphs = [graph(reduced, tmp_path / f"m.{precision}.onnx", precision) for precision in ("fp32", "fp16")]
    proof = prove_on_texts(encoder, torch_step(reduced), *graphs, max_error=0.2, min_agreement=0.5)
    parity = proof.parity
    assert parity.verdict == "PASS", parity.line
    assert parity.line.endswith("on 20 documents")
    names = ("reduced", graphs[0].name, graphs[1].name, "whole")
    assert [(each.name, each.role) for each in parity.links] == [
        (f"{name} {port.name}", port.role) for name in names for port in OUTPUTS
    ]
    assert {each.test for each in parity.structure} >= {"batch-slot", "permutation", "finite", "constant", "batch-size"}
    assert "extremes" not in {each.test for each in parity.structure}
    assert set(proof.figures) >= {"embedding.reduced torch fp32.agrees", "words.reduced torch fp32.token_agreement"}
    save_proof(proof, tmp_path / "parity.json")
    assert load_parity(tmp_path / "parity.json").links == parity.links


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("module", "failing"), [("classify", ["words"]), ("qkv", ["embedding", "words"])])
def test_fault_fails_only_the_outputs_it_reaches(
    encoder: nn.Module, tmp_path: Path, module: str, failing: list[str]
) -> None:
    faulty = graph(scaled(encoder, module, 1.01), tmp_path / "m.onnx", "fp32")
    links = prove_on_texts(encoder, torch_step(encoder, "same"), faulty).parity.links
    assert [each.output for each in links if each.kind == "exact" and each.status == "FAIL"] == failing


def test_candidate_with_other_outputs_is_refused(encoder: nn.Module, tmp_path: Path) -> None:
    class Alone(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            both: tuple[Tensor, Tensor] = encoder(input_ids, attention_mask)
            return both[0]

    save_onnx(onnx_from_model(Alone(), INPUTS, OUTPUTS[:1], precision="fp32", metadata={}), tmp_path / "m.onnx")
    with pytest.raises(BadInput, match="gives embedding, expected embedding, words as the dense model does"):
        prove_on_texts(encoder, candidate_from_path(tmp_path / "m.onnx"))


def test_missing_and_unknown_inputs_are_refused(encoder: nn.Module) -> None:
    missing = ProofInputs(feeds={"input_ids": texts().feeds["input_ids"]}, digest="")
    with pytest.raises(BadInput, match=r"takes attention_mask \[B, 6\] as int64, which is missing"):
        prove_chain(checkpoint_of(encoder), [torch_step(encoder)], missing, limits=ParityLimits(batches=(4,)))
    with pytest.raises(BadInput, match=r"takes input_ids \(int64\), attention_mask \(int64\); give real ones"):
        draw_random_inputs(checkpoint_of(encoder), 4, 0)


@pytest.mark.slow("graph")
def test_model_without_a_classifier_is_compared_by_cosine(tmp_path: Path) -> None:
    dense = tiny.checkpoint(num_classes=0)
    export_checkpoint(dense, tmp_path / "m.onnx", precision="fp32")
    images = ProofInputs(feeds={"images": tiny.images(8)}, digest="")
    steps = [torch_step(dense.model), candidate_from_path(tmp_path / "m.onnx")]
    parity = prove_chain(dense, steps, images, limits=ParityLimits(batches=(4,), min_agreement=0.67)).parity
    assert parity.verdict == "PASS", parity.line
    assert {each.role for each in parity.links} == {"embedding"}
    assert parity.links[0].name == "reduced"
    reason = "agreement of nearest neighbours 100 % (67.56 % to 100 % at 95 % confidence), limit 67 %"
    assert reason in parity.links[0].reason
    assert "top1_agreement" not in str(parity.to_json())


@pytest.mark.parametrize(
    ("count", "labels", "min_agreement", "message"),
    [
        (4, np.zeros(4, dtype=np.int64), None, r"this model has no logits \(logits is embedding\)"),
        (2, None, 0.9, "nearest neighbours need 3 inputs, got 2"),
    ],
)
def test_limits_that_do_not_apply_to_embeddings_are_refused(
    count: int, labels: Any, min_agreement: float | None, message: str
) -> None:
    dense = tiny.checkpoint(num_classes=0)
    images = ProofInputs(feeds={"images": tiny.images(count)}, digest="", labels=labels)
    limits = ParityLimits(min_agreement=min_agreement, batches=(count,))
    with pytest.raises(BadInput, match=message):
        prove_chain(dense, [torch_step(dense.model)], images, limits=limits)


BOUND = exact_tolerance(products=12, largest_logit=1.0)
SCHEDULE = (2, 4)


def margin_by_loops(compared_NX: Any, sizes_N: Any, count: int, protected: int, metric: str) -> float:
    """Return the merge margin of one image's tokens, compared pair by pair in float64."""
    free = range(protected, len(compared_NX))
    evens, odds = list(free)[0::2], list(free)[1::2]

    def cosine(a: int, b: int) -> float:
        one, other = compared_NX[a], compared_NX[b]
        return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))

    spread = compared_NX[protected:].var(axis=0).sum()

    def ward(a: int, b: int) -> float:
        n, m = sizes_N[a], sizes_N[b]
        return -float(n * m / (n + m) * ((compared_NX[a] - compared_NX[b]) ** 2).sum() / spread)

    similarity = ward if metric == "ward" else cosine
    ranked = {even: sorted((similarity(even, odd) for odd in odds), reverse=True) for even in evens}
    order = sorted(evens, key=lambda even: -ranked[even][0])
    gaps = [ranked[even][0] - ranked[even][1] for even in order[:count]]
    if count < len(evens):
        gaps.append(ranked[order[count - 1]][0] - ranked[order[count]][0])
    return min(gaps)


@pytest.mark.parametrize("metric", ["ward", "stream"])
@pytest.mark.parametrize(("tokens", "count", "protected"), [(9, 2, 1), (12, 3, 2), (9, 4, 1), (8, 1, 0)])
def test_merge_margin_is_the_minimum_over_all_pairs(tokens: int, count: int, protected: int, metric: Any) -> None:
    compared = torch.randn(5, tokens, 7, generator=torch.Generator().manual_seed(tokens))
    sizes = torch.randint(1, 5, (5, tokens), generator=torch.Generator().manual_seed(count)).float()
    merge = TokenMerge(count=count, protected=protected, how="merge", metric=metric)
    found = choice_margins(merge, compared, compared, sizes)
    images = zip(compared.double().numpy(), sizes.double().numpy(), strict=True)
    expected = [margin_by_loops(tokens_NX, sizes_N, count, protected, metric) for tokens_NX, sizes_N in images]
    assert found.tolist() == pytest.approx(expected, abs=2e-6)


def test_drop_margin_is_relative_to_the_attention() -> None:
    attention = torch.tensor([[9.0, 0.1, 0.4, 0.2, 0.3], [9.0, 0.4, 0.3, 0.2, 0.2]])
    found = choice_margins(TokenMerge(count=2, protected=1, how="drop"), attention, attention, None)
    assert found.tolist() == pytest.approx([0.5, 0.5])
    one = choice_margins(TokenMerge(count=1, protected=1, how="drop"), attention, attention, None)
    assert one.tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(
    ("how", "metric"), [("merge", "ward"), ("merge", "keys"), ("merge", "attended"), ("drop", "stream")]
)
def test_model_margin_is_the_least_of_its_merges(how: Any, metric: Any) -> None:
    model, images = tiny.checkpoint().model, torch.from_numpy(tiny.images(6))
    assert merge_margins(model, images) is None
    merged = traced_model.with_merging(model, Merging(schedule=SCHEDULE, how=how, metric=metric))
    found = some(merge_margins(merged, images))
    each = []
    with torch.inference_mode():
        walk = StreamState.of(traced_model.first_stream(merged, images), None)
        for step in traced_model.steps(merged):
            if isinstance(step, Merge):
                beside = walk.beside_BNX
                compared = walk.tokens.x if beside is None else beside
                each.append(choice_margins(step.merge, walk.tokens.x, compared, walk.tokens.sizes))
            walk = walk.behind(step)
    assert len(each) == 2
    assert torch.equal(found, torch.minimum(*each))
    assert bool((found >= 0).all())
    assert torch.isfinite(found).all()


def test_equal_tokens_have_zero_margin() -> None:
    compared = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0))
    compared[0, 4] = compared[0, 2] = compared[0, 6]  # a token like these three has no single best match
    compared[0, 1] = compared[0, 2] + 0.01
    found = choice_margins(TokenMerge(count=1, protected=1, how="merge"), compared, compared, None)
    assert abs(float(found)) < 1e-6


def rows(images: int = 40) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    reference = random.normal(size=(images, 5))
    candidate = reference * (1 + 1e-8 * random.normal(size=reference.shape))
    margins = np.full(images, 0.1)
    return reference, candidate, margins


def judge(reference: Any, candidate: Any, margins: Any, limit: float = MOST_APART) -> Link:
    return measure_link(
        name="graph", kind="exact", reference="torch", candidate="graph", reference_rows=reference,
        candidate_by_batch={1: candidate[:4], 8: candidate}, tolerance=BOUND,
        choices=Choices(margins_N=margins, limit=limit),
    )  # fmt: skip


def test_erring_tied_images_are_judged_apart_and_others_fail() -> None:
    reference, candidate, margins = rows()
    candidate[7] *= 1.01
    assert judge(reference, candidate, margins).status == "FAIL"
    bound = some(BOUND.max_relative_error)
    margins[7] = SPREAD * bound * 1.01
    assert judge(reference, candidate, margins).status == "FAIL"
    margins[7], margins[9] = SPREAD * bound * 0.99, 0.0  # image 9 is tied too, but both models merge the same tokens
    found = judge(reference, candidate, margins)
    assert found.status == "PASS"
    ties = some(found.ties)
    assert (ties.inputs, ties.tied, ties.apart) == (40, 2, 1)
    assert ties.worst == pytest.approx(0.01, rel=1e-4)
    assert found.measures.images == 39
    assert found.measures.relative_error < 1e-7
    assert "other tokens were merged on 1 of 40 images (2.5%)" in found.reason


def test_too_many_tied_images_and_nonfinite_outputs_fail() -> None:
    reference, candidate, margins = rows()
    margins[:] = 0.0
    candidate[3:6] *= 1.01
    failed = judge(reference, candidate, margins)
    assert failed.status == "FAIL"
    assert "judged apart: more than 5.0%" in failed.reason
    assert judge(reference, candidate, margins, limit=0.1).status == "PASS"
    candidate *= 1.01
    assert judge(reference, candidate, margins, limit=0.9).status == "FAIL"
    candidate = reference.copy()
    candidate[3] = np.nan
    assert judge(reference, candidate, margins).status == "FAIL"


def test_record_and_reports_show_tied_images() -> None:
    reference, candidate, margins = rows()
    candidate[7] *= 1.01
    margins[7] = 0.0
    images = ImageSet(count=40, digest="d")
    proof = Parity(images=images, links=(judge(reference, candidate, margins),))
    assert "graph merges other tokens on 1, where similarities are equal up to rounding" in proof.line
    assert parity_from_value(proof.to_json(), where="parity.json") == proof
    untied = Parity(images=images, links=(judge(reference, reference, margins + 1.0),))
    assert "other tokens" not in untied.line


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRuntime(Candidate):
    """A torch model whose weights are off by rounding, which stands for a runtime that rounds differently."""

    model: nn.Module

    def _runner(self, scratch: Path) -> ModuleRunner:
        model, generator = copy.deepcopy(self.model), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 1e-7 * torch.randn(parameter.shape, generator=generator))
        return ModuleRunner(model, inputs=input_ports(model), outputs=output_ports(model), label=self.label)


def other_runtime(model: nn.Module, *, fp16: bool = False) -> OtherRuntime:
    name = "fp16" if fp16 else "fp32"
    return OtherRuntime(
        label=name, name=name, form="engine", path=Path(name), float_type=FLOAT16 if fp16 else FLOAT32, model=model
    )


def merged_directory(folder: Path, pixels: Any) -> tuple[Checkpoint, nn.Module]:
    dense = tiny.checkpoint()
    model = traced_model.with_merging(dense.model, Merging(schedule=SCHEDULE))
    save(Checkpoint(model=model, architecture=dense.architecture, lineage={}), folder / "merged")
    np.save(folder / "images.npy", pixels)
    return dense, model


def prove_merged(folder: Path, dense: Checkpoint, *others: Candidate) -> Parity:
    images = inputs_from_set(images_for_model(dense.model, folder / "images.npy"))
    steps = [candidate_from_path(folder / "merged"), *others]
    return prove_chain(dense, steps, images, limits=ParityLimits(batches=(1, 8), max_error=1.0)).parity


def test_merged_model_is_proved_to_its_graph_and_engine(tmp_path: Path) -> None:
    dense, model = merged_directory(tmp_path, tiny.images(24))
    proof = prove_merged(tmp_path, dense, other_runtime(model), other_runtime(model, fp16=True))
    assert proof.verdict == "PASS", proof.line
    merged, exact_link, half, _ = proof.links
    assert (merged.ties, half.ties) == (None, None)
    assert some(exact_link.ties).inputs == 24
    assert "the merged model's own FP16 error" in half.tolerance.rule
    assert "the error of FP16 in the dense model: other tokens are merged there" in half.reason


def test_different_merge_schedule_fails_despite_ties(tmp_path: Path) -> None:
    dense, _ = merged_directory(tmp_path, tiny.images(24))
    other = traced_model.with_merging(dense.model, Merging(schedule=(3, 3)))
    proof = prove_merged(tmp_path, dense, other_runtime(other))
    assert proof.links[1].status == "FAIL", proof.line


def test_batches_stay_untested_if_all_images_are_tied(tmp_path: Path) -> None:
    pixels = tiny.images(8)
    dense, model = merged_directory(tmp_path, pixels)
    with torch.no_grad():
        position = dict(model.named_parameters())["pos_embed"]
        position[:, 1:] = position[:, 1:2]
    save(Checkpoint(model=model, architecture=dense.architecture, lineage={}), tmp_path / "merged")
    np.save(tmp_path / "images.npy", np.repeat(pixels[:, :, :1, :1], 32, axis=2).repeat(32, axis=3))
    proof = prove_merged(tmp_path, dense, other_runtime(model))
    noted = [test for test in proof.structure if test.status == "NOTED" and test.test == "batch-slot"]
    assert [test.candidate for test in noted] == ["merged torch fp32", "fp32"]
