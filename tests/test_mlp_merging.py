"""Tokens merged for MLPs alone: against loops in float64, on which MLPs, graphs, files, budgets and refusals."""

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from corp_deploy.families.inspection import inspection_of_model, merge_margins, merging_record
from corp_deploy.families.timm_arguments import build_from_arguments
from corp_deploy.invocation.calibration import CalibrateOptions
from corp_deploy.invocation.merging import MergedStatistics
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import build_request, merging_from_choice
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import Merging
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.traced.models.mlp_merging import TokenMlp, WindowMerge, give_back
from corp_deploy.views.inspection import merging_lines
from tests import timm_models, tiny
from tests.graphs import needs_rtx
from tests.refusals import rejects
from tests.test_corp_token_merging import BY, merged_by_loops
from tests.test_export_merged import fused_sites, graph_of, require_merged_graph

_SIZE = {"pretrained_cfg_overlay": {"input_size": [3, 64, 64]}, "num_classes": 7}
OTHERS = {
    "convnext": Architecture(name="convnext_tiny", kwargs={**_SIZE, "dims": [16] * 4, "depths": [1] * 4}),
    "mixer": Architecture(name="mixer_s32_224", kwargs={**_SIZE, "img_size": 64}),
    "resnet": Architecture(name="resnet18d", kwargs={**_SIZE, "layers": [1, 1, 1, 1], "channels": [16] * 4}),
}
FORMS = ("windows", "convnext", "class token", "packed gate")
"""A stream of windows, a map, and streams with a class token in front."""


@cache
def library(form: str) -> nn.Module:
    if form not in OTHERS:
        return timm_models.library(form)
    torch.manual_seed(0)
    model = build_from_arguments(OTHERS[form].name, OTHERS[form].kwargs).eval().requires_grad_(False)
    tiny.enliven(model, 0)
    return model


@cache
def dense(form: str) -> nn.Module:
    if form not in OTHERS:
        return timm_models.checkpoint(form).model
    model = dense_from_architecture(OTHERS[form])
    model.load_state_dict(library(form).state_dict())
    return model


def merging(form: str, share: float = 0.3) -> Merging:
    return Merging(schedule=tuple(mlp.count(share) for mlp in traced_model.token_mlps(dense(form))), how="mlp")


@cache
def merged(form: str, share: float = 0.3) -> nn.Module:
    return traced_model.with_merging(dense(form), merging(form, share))


def windows_of(mlp: TokenMlp) -> list[list[int]]:
    """Return the numbers of the tokens of each window, in its order, without tokens in front of the map."""
    (rows, columns), (high, wide) = mlp.grid, mlp.window
    return [
        [
            mlp.protected + row * columns + column
            for row in range(top, top + high)
            for column in range(left, left + wide)
        ]
        for top in range(0, rows, high)
        for left in range(0, columns, wide)
    ]


class ByLoops(nn.Module):
    """An MLP of the library that computes the means of merged tokens, token by token."""

    def __init__(self, mlp: nn.Module, where: TokenMlp, count: int) -> None:
        super().__init__()
        self.mlp, self.where, self.count = mlp, where, count

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for x_NC in x.flatten(1, -2):
            given = torch.empty_like(x_NC)
            for place in range(self.where.protected):
                given[place] = self.mlp(x_NC[place])
            for window in windows_of(self.where):
                own = x_NC[window]
                means, _, went = merged_by_loops(
                    own, torch.ones(len(own)), own, self.count // self.where.windows, 0, BY["ward"]
                )
                given[window] = torch.stack([self.mlp(mean) for mean in means])[went]
            out.append(given)
        return torch.stack(out).reshape(x.shape)


def by_loops(form: str, x: Tensor) -> Tensor:
    model: Any = copy.deepcopy(library(form)).double()
    own = merging(form)
    for mlp, count in zip(traced_model.token_mlps(dense(form)), own.schedule, strict=True):
        parent = model.get_submodule(mlp.path.rpartition(".")[0])
        parent.mlp = ByLoops(parent.mlp, mlp, count)
    outputs: Tensor = model(x.double())
    return outputs


@pytest.mark.parametrize("form", FORMS)
def test_mlps_compute_merged_tokens_like_explicit_loops(form: str) -> None:
    x = timm_models.pixels(dense(form), 2)
    with torch.inference_mode():
        expected = by_loops(form, x).float()
    assert all(merging(form).schedule)
    assert tiny.relative(tiny.ran(dense(form), x), expected) > 1e-3
    torch.testing.assert_close(tiny.ran(merged(form), x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("grid", "window"), [((4, 6), (2, 3)), ((1, 12), (1, 6)), ((4, 4), (4, 4))])
@pytest.mark.parametrize("protected", [0, 2])
def test_equal_tokens_of_a_window_merge_without_loss(
    grid: tuple[int, int], window: tuple[int, int], protected: int
) -> None:
    """Every window has as many merged tokens; tokens of one value in each window keep it."""
    size = window[0] * window[1]
    merge = WindowMerge(count=size // 2, protected=protected, grid=grid, window=window)
    values = torch.arange(grid[0] // window[0] * (grid[1] // window[1])).reshape(grid[0] // window[0], -1)
    tokens = values.repeat_interleave(window[0], 0).repeat_interleave(window[1], 1).flatten()
    x = torch.cat([torch.full((protected,), -1), tokens]).float()[None, :, None].repeat(3, 1, 4)
    merged_BMC, sources_BN = merge(x)
    assert merged_BMC.shape[1] == protected + len(tokens) // 2
    assert torch.equal(give_back(merged_BMC, sources_BN, grid), x)
    if not protected:
        as_map = x.unflatten(1, grid)
        assert torch.equal(give_back(*merge.forward(as_map), grid), as_map)


def test_only_mlps_over_tokens_of_a_stream_are_found() -> None:
    found = {form: traced_model.token_mlps(dense(form)) for form in (*FORMS, "mixer", "resnet")}
    assert {form: {mlp.protected for mlp in mlps} for form, mlps in found.items()} == {
        "windows": {0}, "convnext": {0}, "class token": {1}, "packed gate": {1}, "mixer": {0}, "resnet": set(),
    }  # fmt: skip
    assert all("mlp_channels" in mlp.path for mlp in found["mixer"]), "tokens of a mixer mix in the other one"
    rejects(
        "token merging: no MLP of linear layers over tokens is added to a residual stream",
        traced_model.with_merging, dense("resnet"), Merging(schedule=(1,), how="mlp"),
    )  # fmt: skip
    assert "--merge-how mlp merges tokens for MLPs alone" in traced_model.merging_refusal(dense("windows"))


@pytest.mark.parametrize("form", FORMS)
def test_multiply_adds_fall_by_those_of_the_merged_tokens(form: str) -> None:
    record = merging_record(merged(form))
    assert record is not None
    saved = 0
    for mlp, count in zip(traced_model.token_mlps(dense(form)), merging(form).schedule, strict=True):
        saved += count * sum(each.numel() for each in dense(form).get_submodule(mlp.path).parameters() if each.ndim > 1)
    assert record.macs_with_all_tokens == macs(dense(form))
    assert record.macs == record.macs_with_all_tokens - saved + record.macs_of_merging
    assert record.macs_of_merging < 0.2 * record.macs


def test_records_name_the_tokens_of_every_mlp() -> None:
    record = merging_record(merged("class token"))
    assert record is not None
    assert record.rows == tuple((block, 17, 5, 12) for block in range(2))
    assert "24 instead of 34 tokens pass the MLPs" in record.sentences()[0]
    lines = merging_lines(inspection_of_model(merged("class token")))
    assert lines == [*record.sentences(), "tokens in each MLP: 12 12"]
    assert record.describe() == "merged for MLPs alone: 5,5"


def test_margins_are_those_of_the_least_window_of_each_image() -> None:
    x = timm_models.pixels(dense("windows"), 3)
    margins = merge_margins(merged("windows"), x)
    assert margins is not None
    assert margins.shape == (3,)
    assert torch.equal(margins[1:2], merge_margins(merged("windows"), x[1:2]))  # type: ignore[arg-type]
    assert bool((margins > 0).all())


@pytest.mark.parametrize("options", [{"macs": 0.8}, {"macs": 0.8, "closed_loop": True}])
def test_budget_counts_what_merging_saves(options: dict[str, Any], tmp_path: Path) -> None:
    """Moments without merging fit; the saved model merges as the one in memory."""
    own = timm_models.checkpoint("windows")
    asked = build_request(
        ReduceOptions.from_options(
            {"merge_tokens": "30%", "merge_how": "mlp", "align": {"mlp": 4, "head": 4}, **options}
        )
    )
    images = timm_models.opened(own.model)
    model = reduce_as_asked(own, timm_models.moments("windows"), asked, images=images)[0].model
    without = traced_model.with_merging(model, None)
    assert macs(model) <= 0.8 * macs(own.model) < macs(without)
    save(Checkpoint(model=model, architecture=own.architecture, lineage={}), tmp_path / "reduced")
    loaded, x = load_checkpoint(tmp_path / "reduced").model, timm_models.pixels(own.model, 2)
    assert traced_model.merging_of(loaded) == merging("windows")
    assert torch.equal(tiny.ran(loaded, x), tiny.ran(model, x))
    assert tiny.relative(tiny.ran(without, x), tiny.ran(model, x)) > 1e-3


@pytest.mark.slow("graph")
@pytest.mark.parametrize("form", FORMS)
def test_graph_of_merged_mlps_equals_torch(form: str) -> None:
    model = merged(form)
    require_merged_graph(graph_of(model), model, 1e-5)


@pytest.mark.slow("graph", "engine")
@needs_rtx
def test_engine_of_merged_mlps_keeps_the_fused_attention_of_the_dense_model(tmp_path: Path) -> None:
    of_dense, of_merged = (fused_sites(tmp_path / "m.onnx", each("class token")) for each in (dense, merged))
    assert of_merged == of_dense


@pytest.mark.parametrize(
    ("text", "counts"), [("30%", (5, 5)), ("50%", (8, 8)), ("0%,25%", (0, 4)), (" 10% , 0% ", (2, 0))]
)
def test_shares_become_counts_of_each_mlp(text: str, counts: Sequence[int]) -> None:
    asked = ReduceOptions.from_options({"merge_tokens": text, "merge_how": "mlp"})
    assert merging_from_choice(asked, dense("class token")) == Merging(schedule=tuple(counts), how="mlp")
    assert asked.of_statistics == MergedStatistics()
    assert asked.method_asked.mlp_sparsity is None, "nothing to repair in a stream with all tokens"


@pytest.mark.parametrize("text", ["12", "30", "51%", "10%,20%,30%", "-3%", "3.5%", "%"])
def test_other_texts_than_shares_are_refused(text: str) -> None:
    asked = ReduceOptions.from_options({"merge_tokens": text, "merge_how": "mlp"})
    rejects(
        r"expected the share of its tokens that each MLP merges away, 50% at most",
        merging_from_choice,
        asked,
        dense("class token"),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge_tokens": "auto", "macs": 0.8}, "with --merge-how mlp give a share: 30%"),
        (
            {"merge_tokens": "30%", "merge_metric": "keys"},
            "--merge-metric keys has no effect on tokens merged for MLPs",
        ),
        ({"merge_tokens": "30%", "merge_outputs": "unmerged"}, "every token keeps a value of its own"),
        ({"merge_tokens": "30%", "latency": 0.8, "latency_tables": "tables"}, "without what --merge-how mlp saves"),
    ],
)
def test_options_without_effect_on_mlps_are_refused(options: dict[str, Any], message: str) -> None:
    rejects(message, ReduceOptions.from_options, {"merge_how": "mlp", **options})


def test_calibration_refuses_merging_for_mlps() -> None:
    rejects(
        "--merge-how mlp changes no statistics; calibrate without --merge-tokens",
        CalibrateOptions.from_options, {"merge_tokens": "30%", "merge_how": "mlp"},
    )  # fmt: skip


def test_schedules_that_do_not_fit_the_windows_are_refused() -> None:
    count = len(traced_model.token_mlps(dense("class token")))
    for schedule, message in (
        ((9,) * count, r"MLP 0 has 1 windows of 16 tokens, expected a multiple of 1 up to 8, got 9"),
        ((1,), rf"a schedule of 1 entries for {count} MLPs"),
    ):
        rejects(message, traced_model.with_merging, dense("class token"), Merging(schedule=schedule, how="mlp"))
    rejects("compared by ward", Merging, schedule=(1,), how="mlp", unmerged=True)
