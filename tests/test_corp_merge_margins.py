"""How near merges are to others, and links judged apart from what two runtimes choose by rounding alone."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.families.merge_margins import margins_of, merge_margins
from corp_deploy.proof.candidates import Candidate, candidate_from_path
from corp_deploy.proof.chain import prove
from corp_deploy.proof.inputs import inputs_from_set
from corp_deploy.proof.link_rules import ParityLimits
from corp_deploy.store.checkpoint import Checkpoint, save
from corp_deploy.store.inputs import images_for_model
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.steps import Merge, StreamState
from corp_deploy.traced.models.token_merging import TokenMerge
from ground.precision import FLOAT16, FLOAT32
from perf.parity.parity import ImageSet, Link, Parity, link, parity_from_value
from perf.parity.ties import MOST_APART, SPREAD, Choices
from perf.parity.tolerance import exact
from perf.runners.module import ModuleRunner

from . import tiny

BOUND = exact(products=12, largest_logit=1.0)
SCHEDULE = (2, 4)


def margin_by_loops(compared_NX: Any, sizes_N: Any, count: int, protected: int, metric: str) -> float:
    """The tokens of one image, pair by pair, in float64."""
    free = range(protected, len(compared_NX))
    evens, odds = list(free)[0::2], list(free)[1::2]

    def cosine(a: int, b: int) -> float:
        one, other = compared_NX[a], compared_NX[b]
        return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))

    spread = compared_NX[protected:].var(axis=0).sum()

    def ward(a: int, b: int) -> float:
        n, m = sizes_N[a], sizes_N[b]
        return -float(n * m / (n + m) * ((compared_NX[a] - compared_NX[b]) ** 2).sum() / spread)

    by = ward if metric == "ward" else cosine
    alike = {even: sorted((by(even, odd) for odd in odds), reverse=True) for even in evens}
    order = sorted(evens, key=lambda even: -alike[even][0])
    gaps = [alike[even][0] - alike[even][1] for even in order[:count]]
    if count < len(evens):
        gaps.append(alike[order[count - 1]][0] - alike[order[count]][0])
    return min(gaps)


@pytest.mark.parametrize("metric", ["ward", "stream"])
@pytest.mark.parametrize(("tokens", "count", "protected"), [(9, 2, 1), (12, 3, 2), (9, 4, 1), (8, 1, 0)])
def test_a_margin_is_that_of_all_pairs(tokens: int, count: int, protected: int, metric: Any) -> None:
    compared = torch.randn(5, tokens, 7, generator=torch.Generator().manual_seed(tokens))
    sizes = torch.randint(1, 5, (5, tokens), generator=torch.Generator().manual_seed(count)).float()
    found = margins_of(
        TokenMerge(count=count, protected=protected, how="merge", metric=metric), compared, compared, sizes
    )
    images = zip(compared.double().numpy(), sizes.double().numpy(), strict=True)
    expected = [margin_by_loops(image, of_image, count, protected, metric) for image, of_image in images]
    assert found.tolist() == pytest.approx(expected, abs=2e-6)


def test_the_margin_of_a_drop_is_a_share_of_the_attention_there() -> None:
    attention = torch.tensor([[9.0, 0.1, 0.4, 0.2, 0.3], [9.0, 0.4, 0.3, 0.2, 0.2]])
    found = margins_of(TokenMerge(count=2, protected=1, how="drop"), attention, attention, None)
    assert found.tolist() == pytest.approx([0.5, 0.5])
    one = margins_of(TokenMerge(count=1, protected=1, how="drop"), attention, attention, None)
    assert one.tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("how", ["merge", "drop"])
@pytest.mark.parametrize("metric", ["ward", "attended", "stream", "keys"])
def test_the_margin_of_a_model_is_the_least_of_its_merges(how: Any, metric: Any) -> None:
    model, images = tiny.checkpoint().model, torch.from_numpy(tiny.images(6))
    assert merge_margins(model, images) is None
    merged = traced_model.with_merging(model, Merging(schedule=SCHEDULE, how=how, metric=metric))
    found = merge_margins(merged, images)
    assert found is not None
    each = []
    with torch.inference_mode():
        walk = StreamState.of(traced_model.embedded(merged, images), None)
        for step in traced_model.steps(merged):
            if isinstance(step, Merge):
                beside = walk.beside_BNX
                compared = walk.tokens.x if beside is None else beside
                each.append(margins_of(step.merge, walk.tokens.x, compared, walk.tokens.sizes))
            walk = walk.behind(step)
    assert len(each) == 2
    assert torch.equal(found, torch.minimum(*each))
    assert bool((found >= 0).all())
    assert torch.isfinite(found).all()


def test_equal_tokens_have_no_margin() -> None:
    compared = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0))
    compared[0, 4] = compared[0, 2] = compared[0, 6]  # three odd places alike: whoever is like them has no one best
    compared[0, 1] = compared[0, 2] + 0.01
    found = margins_of(TokenMerge(count=1, protected=1, how="merge"), compared, compared, None)
    assert abs(float(found)) < 1e-6


def rows(images: int = 40) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    reference = random.normal(size=(images, 5))
    candidate = reference * (1 + 1e-8 * random.normal(size=reference.shape))
    margins = np.full(images, 0.1)
    return reference, candidate, margins


def judged(reference: Any, candidate: Any, margins: Any, limit: float = MOST_APART) -> Link:
    return link(
        name="graph", kind="exact", reference="torch", candidate="graph", reference_rows=reference,
        candidate_by_batch={1: candidate[:4], 8: candidate}, tolerance=BOUND,
        choices=Choices(margins_N=margins, limit=limit),
    )  # fmt: skip


def test_a_tie_that_errs_is_judged_apart_and_one_that_is_none_fails() -> None:
    reference, candidate, margins = rows()
    candidate[7] *= 1.01
    assert judged(reference, candidate, margins).status == "FAIL"
    bound = BOUND.max_relative_error
    assert bound is not None
    margins[7] = SPREAD * bound * 1.01
    assert judged(reference, candidate, margins).status == "FAIL"
    margins[7], margins[9] = SPREAD * bound * 0.99, 0.0  # the ninth is tied too, and both chose alike
    found = judged(reference, candidate, margins)
    assert found.status == "PASS"
    assert found.ties is not None
    assert (found.ties.inputs, found.ties.tied, found.ties.apart) == (40, 2, 1)
    assert found.ties.worst == pytest.approx(0.01, rel=1e-4)
    assert found.measures.images == 39
    assert found.measures.relative_error < 1e-7
    assert "other tokens were merged on 1 of 40 images (2.5%)" in found.reason


def test_too_many_apart_fail_and_what_is_not_finite_is_no_choice() -> None:
    reference, candidate, margins = rows()
    margins[:] = 0.0
    candidate[3:6] *= 1.01
    failed = judged(reference, candidate, margins)
    assert failed.status == "FAIL"
    assert "judged apart: more than 5.0%" in failed.reason
    assert judged(reference, candidate, margins, limit=0.1).status == "PASS"
    candidate *= 1.01
    assert judged(reference, candidate, margins, limit=0.9).status == "FAIL"
    candidate = reference.copy()
    candidate[3] = np.nan
    assert judged(reference, candidate, margins).status == "FAIL"


def test_the_record_and_the_reports_say_it() -> None:
    reference, candidate, margins = rows()
    candidate[7] *= 1.01
    margins[7] = 0.0
    own = judged(reference, candidate, margins)
    proof = Parity(images=ImageSet(count=40, digest="d"), links=(own,))
    assert "graph merges other tokens on 1, where similarities are equal to rounding" in proof.line
    again = parity_from_value(proof.to_json(), where="parity.json")
    assert again == proof
    plain = Parity(images=ImageSet(count=40, digest="d"), links=(judged(reference, reference, margins + 1.0),))
    assert "other tokens" not in plain.line


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRuntime(Candidate):
    """Computes a torch model with every weight a rounding off, as a runtime that rounds otherwise does."""

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


def proved(folder: Path, dense: Checkpoint, *others: Candidate) -> Parity:
    given = inputs_from_set(images_for_model(dense.model, folder / "images.npy"))
    steps = [candidate_from_path(folder / "merged"), *others]
    return prove(dense, steps, given, batches=(1, 8), limits=ParityLimits(max_error=1.0)).parity


def test_a_merged_model_is_proved_to_what_computes_it(tmp_path: Path) -> None:
    dense, model = merged_directory(tmp_path, tiny.images(24))
    proof = proved(tmp_path, dense, other_runtime(model), other_runtime(model, fp16=True))
    assert proof.verdict == "PASS", proof.line
    merged, exact_link, half, _ = proof.links
    assert (merged.ties, half.ties) == (None, None)
    assert exact_link.ties is not None
    assert exact_link.ties.inputs == 24
    assert "the merged model's own FP16 error" in half.tolerance.rule
    assert "what FP16 does to the dense model: other tokens are merged there" in half.reason


def test_another_schedule_is_a_fault_that_no_tie_excuses(tmp_path: Path) -> None:
    dense, _ = merged_directory(tmp_path, tiny.images(24))
    other = traced_model.with_merging(dense.model, Merging(schedule=(3, 3)))
    proof = proved(tmp_path, dense, other_runtime(other))
    assert proof.links[1].status == "FAIL", proof.line


def test_images_all_tied_leave_batches_untested_and_say_so(tmp_path: Path) -> None:
    pixels = tiny.images(8)
    dense, model = merged_directory(tmp_path, pixels)
    with torch.no_grad():
        position = dict(model.named_parameters())["pos_embed"]
        position[:, 1:] = position[:, 1:2]
    save(Checkpoint(model=model, architecture=dense.architecture, lineage={}), tmp_path / "merged")
    np.save(tmp_path / "images.npy", np.repeat(pixels[:, :, :1, :1], 32, axis=2).repeat(32, axis=3))
    proof = proved(tmp_path, dense, other_runtime(model))
    noted = [test for test in proof.structure if test.status == "NOTED" and test.test == "batch-slot"]
    assert [test.candidate for test in noted] == ["merged torch fp32", "fp32"]
