"""Models that a family serves, beside the same ones whose sites are looked for in their programs."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.coverage.beside import Way, matched, no_families, ways_of, write_weights
from benchmarks.coverage.chain import away
from benchmarks.coverage.instances import INSTANCES
from benchmarks.coverage.models import architecture_of, outputs
from calib.input_set import InputSet
from calib.moments import Moments
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.site import Site
from corp_deploy.planning.budget import allocate
from corp_deploy.planning.curves import CostCurve
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.halves import in_halves
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.reduction.named_loop import reduce_by_closed_loop, reduce_by_symmetric_loop
from corp_deploy.reduction.report import SiteReport
from corp_deploy.store.dense_model import load_dense
from tests import vit_forms

NAMES = ("deit3_small_patch16_224",)


def told(report: SiteReport) -> tuple[float, ...]:
    assert report.ridge_fit is not None or report.part == "qk"
    assert report.held_out is not None
    lost = report.error / report.energy, report.held_out.error / report.energy  # scales stand in queries, or behind
    return report.width_dense, report.width, *lost


def of_half(way: Way, images: InputSet, number: int) -> Moments:
    return way.calibrated(images)


@pytest.mark.slow("graph")
@pytest.mark.parametrize("name", NAMES)
def test_programs_give_what_families_give(name: str, tmp_path: Path) -> None:
    """In halves of the images that choose ridges, and judged on others; queries, keys and values become equally wide,
    squeezes follow what they squeeze.
    """
    instance = next(each for each in INSTANCES if each.name == name)
    reductions, answers, own = list[Reduction](), list[torch.Tensor](), tuple[Site, ...]()
    for way in ways_of(instance, architecture_of(instance), tmp_path):
        with way.hidden():
            found = sites_of(way.model).every
            own = own or found
            both = matched(own, found)[0] if reductions else {site.name for site in found}
            groups_B = torch.arange(way.fitted.count) // 2
            moments = in_halves(way.fitted, groups_B, partial(of_half, way), seed=0)
            new = way.reduced(moments, "best square", both, held_out=way.calibrated(way.judged))
            reductions.append(new)
            answers.append(way.answers(new.model))
            exported = family_of(new.model).exportable(new.model)
            assert away(way.answers(exported), answers[-1]) < 1e-5
    one, other = reductions
    assert len(one.sites) > 4
    by_part = [
        sorted(each.sites, key=lambda report: report.part if report.part in ("qk", "v") else "")
        for each in (one, other)
    ]
    for expected, got in zip(*by_part, strict=True):
        assert told(got) == pytest.approx(told(expected), rel=1e-4), (expected, got)
    assert away(answers[1], answers[0]) < 1e-4


LOOPS: Mapping[str, Callable[..., Reduction]] = {
    "symmetric": reduce_by_symmetric_loop,
    "asymmetric": reduce_by_closed_loop,
    "all tokens": partial(reduce_by_closed_loop, loop=Loop(reads="all")),
}


@pytest.mark.slow("graph")
def test_loops_over_programs_give_what_loops_over_families_do(tmp_path: Path) -> None:
    """The same heads go and the same dimensions of those left; fits are to the class token where it is all that is
    read.
    """
    half = method_from_preset("corp", heads_sparsity=0.5, attention_sparsity=0.5, align_head=4)
    instance = next(each for each in INSTANCES if each.name == "deit_tiny_patch16_224")
    every = list[tuple[list[tuple[int, int, float]], torch.Tensor]]()
    for way in ways_of(instance, architecture_of(instance), tmp_path):
        with way.hidden():
            for loop in LOOPS.values():
                new = loop(way.model, way.fitted, half)
                losses = [(each.width_dense, each.width, each.r2) for each in new.sites if each.part == "heads"]
                every.append((losses, way.answers(new.model)))
    for (expected, answers), (got, others) in zip(every[: len(LOOPS)], every[len(LOOPS) :], strict=True):
        assert got == [pytest.approx(each, rel=1e-4) for each in expected]
        assert len(got) == 2
        assert away(others, answers) < 1e-4
    assert away(every[1][1], every[2][1]) > 1e-2


@pytest.mark.parametrize("form", ["class token", "q/k norm"])
def test_programs_merge_what_families_do(form: str, tmp_path: Path) -> None:
    """The same clusters of channels and heads, what they lose, and outputs."""
    architecture, weights = vit_forms.architecture(form), tmp_path / "weights.safetensors"
    write_weights(architecture, weights)
    every = list[list[tuple[list[SiteReport], torch.Tensor]]]()
    for hidden in (nullcontext, no_families):
        with hidden():
            dense = load_dense(architecture.name, weights=weights, kwargs=architecture.kwargs)
            images = vit_forms.opened(dense.model, 40)
            moments = calibrate(dense, images, batch_size=8)
            made = list[tuple[list[SiteReport], torch.Tensor]]()
            for preset in ("fold", "grail-fold"):
                half = method_from_preset(preset, mlp_sparsity=0.5, heads_sparsity=1 / 3, align_hidden=8)
                new = reduce(dense.model, moments, half, images=images)
                made.append((sorted(new.sites, key=by_part), outputs(new.model, images.batches(8))))
            every.append(made)
    for (expected, answers), (got, others) in zip(*every, strict=True):
        assert [each.part for each in got] == ["heads", "heads", "mlp", "mlp"]
        for one, other in zip(expected, got, strict=True):
            assert (one.width, one.width_dense) == (other.width, other.width_dense)
            lost = other.error, other.error_uncompensated, other.energy
            assert lost == pytest.approx((one.error, one.error_uncompensated, one.energy), rel=2e-4)
        assert away(others, answers) < 1e-5


def by_part(report: SiteReport) -> tuple[str, str]:
    return report.part, report.site


def test_tied_sites_have_the_same_place_among_their_widths() -> None:
    shared = {"widths": (1, 2, 4), "cost_now": 4, "tied": "attn"}
    queries = CostCurve(site="attn.qk", costs=(1, 2, 4), errors=(9.0, 8.0, 0.0), **shared)  # type: ignore[arg-type]
    values = CostCurve(site="attn.v", costs=(1, 2, 4), errors=(3.0, 0.1, 0.0), **shared)  # type: ignore[arg-type]
    mlp = CostCurve(site="mlp", widths=(8, 16), costs=(4, 8), errors=(5.0, 0.0), cost_now=8)
    allocated = allocate([queries, mlp, values], 16, 0.75)
    assert allocated.widths == {"attn.qk": 4, "mlp": 8, "attn.v": 4}
    assert allocate([queries, mlp, values], 16, 0.5).widths == {"attn.qk": 2, "mlp": 8, "attn.v": 2}
