"""Token merging in one stage of a hierarchical model: which blocks merge, and outputs against loops in float64."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.planning.merge_curves import find_merge_places
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.spec.merging import Merging
from corp_deploy.traced.models.steps import StreamState, Unmerge
from tests import timm_models, tiny
from tests.graphs import needs_rtx
from tests.test_corp_token_merging import BY, merged_by_loops
from tests.test_export_merged import fused_sites, graph_of, require_merged_graph

STAGES: dict[str, list[int]] = {"hiera": [1, 1, 4, 1], "hiera_abswin": [1, 1, 3, 1]}
BLOCKS = ("blocks.3", "blocks.4", "blocks.5")
"""Those of the third stage behind the one that pools its queries; `hiera_abswin` has the first two."""
SCHEDULE = (2, 3, 1)


def library(form: str) -> nn.Module:
    return timm_models.library(form, stages=STAGES[form])


@cache
def dense(form: str) -> nn.Module:
    return timm_models.of_state(form, library(form).state_dict(), stages=STAGES[form]).model


def merging(form: str) -> Merging:
    return Merging(schedule=SCHEDULE[: STAGES[form][2] - 1])


def merged(form: str) -> nn.Module:
    return traced_model.with_merging(dense(form), merging(form))


def by_loops(form: str, x: Tensor) -> Tensor:
    """Outputs of timm's model, in which blocks merge tokens one by one, in float64, and the last gives all back."""
    model: Any = library(form).double()

    def merge(_: nn.Module, entering: tuple[Tensor, ...]) -> None:
        caught.clear()
        for x_NC in entering[0]:
            sizes_N, went_M = torch.ones(len(x_NC)), torch.arange(len(x_NC))
            for block, count in zip(blocks, merging(form).schedule, strict=True):
                every = block.attn.qkv(block.norm1(x_NC)).unflatten(-1, (3, block.attn.heads, -1))
                q, k, v = every.permute(1, 2, 0, 3)
                scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + sizes_N.double().log()
                x_NC = x_NC + block.ls1(block.attn.proj((scores.softmax(-1) @ v).transpose(0, 1).flatten(1)))
                x_NC, sizes_N, went = merged_by_loops(x_NC, sizes_N, x_NC, count, 0, BY["ward"])
                went_M = went[went_M]
                x_NC = x_NC + block.ls2(block.mlp(block.norm2(x_NC)))
            caught.append(x_NC[went_M])

    caught: list[Tensor] = []
    blocks = [model.get_submodule(name) for name, _ in zip(BLOCKS, merging(form).schedule, strict=False)]
    blocks[0].register_forward_pre_hook(merge)
    blocks[-1].register_forward_hook(lambda *_: torch.stack(caught))
    outputs: Tensor = model(x.double())
    return outputs


@pytest.mark.parametrize("form", STAGES)
def test_blocks_of_a_stage_merge_like_explicit_loops(form: str) -> None:
    """They give all tokens back before the next stage; without a merge the model is the dense one."""
    model, x = merged(form), timm_models.pixels(dense(form), 3)
    with torch.inference_mode():
        expected = by_loops(form, x).float()
        walk, steps = StreamState.of(traced_model.first_stream(model, x), None), list(traced_model.steps(model))
        for step in steps:
            walk = walk.behind(step)
        (given,) = traced_model.outputs_of_walk(model, walk, x)
    assert tiny.relative(tiny.ran(dense(form), x), expected) > 0.01
    torch.testing.assert_close(tiny.ran(model, x), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(given, tiny.ran(model, x))
    assert sum(isinstance(step, Unmerge) for step in steps) == 1
    names = [f"{name}.attn" for name, _ in zip(BLOCKS, merging(form).schedule, strict=False)]
    assert [place.before for place in find_merge_places(dense(form))] == names
    plain = traced_model.with_merging(dense(form), Merging(schedule=(0,) * len(names)))
    torch.testing.assert_close(tiny.ran(plain, x), tiny.ran(dense(form), x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow("models")
def test_closed_loop_and_polish_repair_a_merged_stage() -> None:
    model = merged("hiera")
    images = timm_models.opened(model, 64, 1)
    full = timm_models.method(mlp_sparsity=0.0, attention_sparsity=0.0, conv_sparsity=0.0)
    repaired = reduce_traced(model, images, full, loop=Loop()).model
    pixels = timm_models.pixels(model, 64, 1)
    expected = tiny.ran(dense("hiera"), pixels)
    before, after = (float((tiny.ran(each, pixels) - expected).norm()) for each in (model, repaired))
    assert after < 0.97 * before
    half = reduce_traced(model, images, timm_models.method("none")).model
    polish = polished(dense("hiera"), half, images, PolishOptions(steps=1)).report
    assert polish.error < 0.97 * polish.error_before


@pytest.mark.slow("graph")
def test_graph_of_a_merged_stage_equals_torch() -> None:
    model = merged("hiera")
    require_merged_graph(graph_of(model), model, 1e-5)


@pytest.mark.slow("graph", "engine")
@needs_rtx
def test_engine_of_a_merged_stage_keeps_the_fused_attention_of_the_dense_model(tmp_path: Path) -> None:
    of_dense, of_merged = (fused_sites(tmp_path / "m.onnx", each) for each in (dense("hiera"), merged("hiera")))
    assert of_merged == of_dense
    assert {f"{name}.attn" for name in BLOCKS} <= set(of_merged or ())
