"""Merged tokens with rotary embeddings and position biases: the arithmetic and models against loops in float64."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy import load
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from corp_deploy.families.inspection import merging_record
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.merging import Merging
from corp_deploy.store.checkpoint import save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.position_means import mean_positions, scaled_turn, source_shares
from corp_deploy.traced.models.steps import StreamState
from export.graph.to_onnx import save_onnx
from tests import hf_towers, timm_models, tiny
from tests.doubles import some
from tests.graphs import built, needs_rtx
from tests.refusals import rejects
from tests.test_corp_token_merging import BY, merged_by_loops
from tests.test_export_merged import graph_of, require_merged_graph

TURNED = ("neighbours turned, packed gate", "halves turned, registers", "learned angles")
MERGED = (
    *TURNED, "turned, norms inside", "halves turned, biases", "turned, attention pool", "q/k norm, groups", "tables",
    "tables, one of them for all blocks", "networks", "a network for all blocks, norms behind",
)  # fmt: skip
SCHEDULE = (3, 4)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(tokens: int, count: int, protected: int, batch: int = 3) -> Tensor:
    """Sources [B,M], each token with at least one, protected ones alone and in front."""
    generator, free = torch.Generator().manual_seed(1), tokens - protected
    rows = [torch.cat([torch.arange(count - protected), torch.randint(0, count - protected, (tokens - count,))])]
    rows += [rows[0][torch.randperm(free, generator=generator)] for _ in range(batch - 1)]
    protected_BP = torch.arange(protected).expand(batch, -1)
    return torch.cat([protected_BP, torch.stack(rows) + protected], dim=1)


def members(sources_M: Tensor, token: int) -> list[int]:
    return [place for place, into in enumerate(sources_M.tolist()) if into == token]


@pytest.mark.parametrize(("tokens", "count", "protected"), [(9, 5, 2), (8, 4, 0)])
def test_means_of_positions_equal_loops(tokens: int, count: int, protected: int) -> None:
    """A rotation's table has no rows of protected tokens; a bias has rows and columns of all."""
    sources_BM, table_XD, bias_HMM = (
        spread(tokens, count, protected),
        random(1, 1, tokens - protected, 6),
        random(1, 2, tokens, tokens),
    )
    turned = mean_positions(table_XD, source_shares(sources_BM, count, protected), 2)
    shares_BNM = source_shares(sources_BM, count, 0)
    biased = mean_positions(mean_positions(bias_HMM, shares_BNM, 2), shares_BNM, 3)
    assert turned.shape == (3, 1, count - protected, 6)
    assert biased.shape == (3, 2, count, count)
    for image, sources_M in enumerate(sources_BM):
        for one in range(count):
            ones = members(sources_M, one)
            if one >= protected:
                expected_D = torch.stack([table_XD[0, 0, each - protected] for each in ones]).mean(dim=0)
                torch.testing.assert_close(turned[image, 0, one - protected], expected_D, rtol=1e-6, atol=1e-6)
            for other in range(count):
                pairs = [bias_HMM[0, :, x, y] for x in ones for y in members(sources_M, other)]
                expected_H = torch.stack(pairs).mean(dim=0)
                torch.testing.assert_close(biased[image, :, one, other], expected_H, rtol=1e-6, atol=1e-6)


def test_means_of_turns_give_means_of_scores_and_are_scaled_to_the_root_of_their_length() -> None:
    """For tokens of equal content."""
    angles_MD = random(8, 2, seed=3) * 2.0
    table_MX = torch.cat([angles_MD.sin(), angles_MD.cos()], dim=-1).repeat_interleave(2, dim=-1)
    sources_BM, q_4, k_4 = spread(8, 3, 0, batch=1), random(4, seed=4), random(4, seed=5)
    shares_NM = source_shares(sources_BM, 3, 0)[0].double()

    def scores(table_NX: Tensor) -> Tensor:
        q_NX, k_NX = (apply_rot_embed_cat(each.expand(len(table_NX), -1), table_NX) for each in (q_4, k_4))
        return q_NX @ k_NX.T

    means_NX = mean_positions(table_MX[None, None], shares_NM[None], 2)[0, 0]
    expected_NN = shares_NM @ scores(table_MX) @ shares_NM.T
    torch.testing.assert_close(scores(means_NX), expected_NN)
    sin_N4, cos_N4 = means_NX.chunk(2, dim=1)
    lengths_N4 = (sin_N4.square() + cos_N4.square()).sqrt()
    torch.testing.assert_close(scaled_turn(sin_N4, cos_N4), sin_N4 / lengths_N4.sqrt(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scaled_turn(cos_N4, sin_N4), cos_N4 / lengths_N4.sqrt(), rtol=1e-6, atol=1e-6)
    assert float(scaled_turn(torch.zeros(1), torch.zeros(1))) == 0.0


def heads_of(vit: Any, index: int, x_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [H,N,D] of a block, before positions."""
    block = vit.blocks[index]
    attention, x_NC = block.attn, block.norm1(x_NC)
    biases = [getattr(attention, f"{name}_bias", None) for name in "qkv"]
    bias = torch.cat(biases) if biases[0] is not None else attention.qkv.bias  # type: ignore[arg-type]
    every = F.linear(x_NC, attention.qkv.weight, bias).unflatten(-1, (3, attention.num_heads, -1))
    q, k, v = every.permute(1, 2, 0, 3)
    return q, k, v


def turned_by_loops(vit: Any, index: int, x_HND: Tensor, sources_M: Tensor) -> Tensor:
    """Turn each token by the angles of each of its sources, and scale the mean; protected tokens are not turned."""
    prefix, result = vit.num_prefix_tokens, x_HND.clone()
    table = vit.rope.get_embed(vit.patch_embed.grid_size).double()
    table = table[index] if table.dim() == 4 else table
    for token in range(prefix, x_HND.shape[1]):
        turned = [
            apply_rot_embed_cat(
                x_HND[:, token],
                table[..., each - prefix, :],
                half=getattr(vit.blocks[index].attn, "rotate_half", False),
            )
            for each in members(sources_M, token)
        ]
        sin_XD, cos_XD = torch.stack([table[..., each - prefix, :] for each in members(sources_M, token)]).chunk(
            2, dim=-1
        )
        result[:, token] = torch.stack(turned).mean(dim=0) / torch.complex(cos_XD, sin_XD).mean(dim=0).abs().sqrt()
    return result


def biased_by_loops(vit: Any, index: int, sources_M: Tensor, count: int) -> Tensor:
    """The mean bias [H,N,N] of all pairs of sources."""
    attention = vit.blocks[index].attn
    named = dict(attention.named_children())
    bias_HMM = (named["rel_pos"].get_bias() if "rel_pos" in named else attention._get_rel_pos_bias())[0].double()
    every = [members(sources_M, token) for token in range(count)]
    rows = [[bias_HMM[:, one][:, :, other].mean(dim=(1, 2)) for other in every] for one in every]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=1)


def first_of(vit: Any, patches: Tensor) -> Tensor:
    """The stream [N,C] in front of the first block."""
    if "rope" in dict(vit.named_children()):
        first: Tensor = vit.norm_pre(vit._pos_embed(patches)[0])
        return first[0]
    return torch.cat([vit.cls_token[0], patches[0]])


def scaled(block: Any, number: int, x_NC: Tensor) -> Tensor:
    named = dict(block.named_children())
    gamma: Tensor | None = None if f"ls{number}" in named else getattr(block, f"gamma_{number}")
    return named[f"ls{number}"](x_NC) if f"ls{number}" in named else x_NC if gamma is None else gamma * x_NC


def by_loops(vit: Any, x: Tensor, merging: Merging) -> Tensor:
    """A merged model's outputs from the dense model's parts, image by image and token by token, in float64."""
    outputs = []
    for image in x.split(1):
        x_NC = first_of(vit, vit.patch_embed(image))
        sizes_N, went_M = torch.ones(len(x_NC)), torch.arange(len(x_NC))
        for index, (block, count) in enumerate(zip(vit.blocks, merging.schedule, strict=True)):
            q, k, v = heads_of(vit, index, x_NC)
            bias: Tensor | float = 0.0
            if "rope" in dict(vit.named_children()):
                q, k = (turned_by_loops(vit, index, each, went_M) for each in (q, k))
            else:
                bias = biased_by_loops(vit, index, went_M, len(x_NC))
            scores = q @ k.transpose(1, 2) * block.attn.scale + bias + sizes_N.double().log()
            attended = block.attn.proj((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
            x_NC = x_NC + scaled(block, 1, attended)
            x_NC, sizes_N, went = merged_by_loops(x_NC, sizes_N, x_NC, count, vit.num_prefix_tokens, BY[merging.metric])
            went_M = went[went_M]
            x_NC = x_NC + scaled(block, 2, block.mlp(block.norm2(x_NC)))
        outputs.append(vit.forward_head(vit.norm(x_NC[went_M].unsqueeze(0))))
    return torch.cat(outputs)


@pytest.mark.parametrize("form", [*TURNED, "turned, attention pool", "tables", "networks"])
def test_merged_model_equals_explicit_loops(form: str) -> None:
    dense, merging = timm_models.checkpoint(form).model, Merging(schedule=SCHEDULE)
    x = torch.from_numpy(tiny.images(2))
    with torch.inference_mode():
        got = traced_model.with_merging(dense, merging)(x)
        expected = by_loops(copy.deepcopy(dense).double(), x.double(), merging).float()
        assert tiny.relative(dense(x), expected) > 0.02
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", MERGED)
def test_models_with_positions_merge_and_run_cut_by_cut(form: str) -> None:
    """Without a merge the model is the dense one to the last bit."""
    dense, x = timm_models.checkpoint(form).model, torch.from_numpy(tiny.images(3))
    assert traced_model.merging_refusal(dense) == ""
    model = traced_model.with_merging(dense, Merging(schedule=SCHEDULE))
    plain = traced_model.with_merging(dense, Merging(schedule=(0, 0)))
    alone = traced_model.with_merging(model, None)
    with torch.inference_mode():
        walk = StreamState.of(traced_model.first_stream(model, x), None)
        for step in traced_model.steps(model):
            walk = walk.behind(step)
        (given,) = traced_model.outputs_of_walk(model, walk, x)
        assert torch.equal(given, model(x))
        assert torch.equal(plain(x), alone(x))
        torch.testing.assert_close(plain(x), dense(x), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(model(x), dense(x), rtol=1e-3)
    fused = [node for node in traced_model.tracing(model).running.nodes if "scaled_dot" in node.name]
    assert len(fused) >= 2


def test_equal_tables_of_all_blocks_are_averaged_once_per_merge() -> None:
    dense = timm_models.checkpoint("halves turned, registers").model
    merging = Merging(schedule=SCHEDULE)
    model = traced_model.with_merging(dense, merging)
    means = [node for node in traced_model.tracing(model).running.nodes if node.target is mean_positions]
    assert len(means) == 2, "a sine and a cosine for queries and keys of the second block"
    record = some(merging_record(model))
    assert record.macs == macs(model)
    plain = some(merging_record(traced_model.with_merging(timm_models.checkpoint("registers").model, merging)))
    # Of 16 patches 13 are left, with 16 sines and 16 cosines each.
    assert record.macs_of_merging == plain.macs_of_merging + 13 * 16 * 2 * 16


def test_dinov3_of_transformers_merges_and_round_trips(tmp_path: Path) -> None:
    """Its heads are split into protected tokens and patches."""
    hf_towers.write_tower(tmp_path, "DINOv3ViTModel")
    dense, pixels = load_dense(f"hf:{tmp_path}", weights=None, kwargs={}), tiny.images(2)
    merged = traced_model.with_merging(dense.model, Merging(schedule=SCHEDULE))
    assert 1e-4 < tiny.relative(tiny.ran(merged, pixels), tiny.ran(dense.model, pixels)) < 0.5
    save(replace(dense, model=merged), tmp_path / "merged")
    assert torch.equal(tiny.ran(load(tmp_path / "merged"), pixels), tiny.ran(merged, pixels))


class _Masked(nn.Module):
    """Two attentions of queries that see neighbours alone."""

    input_size = (3, 16, 16)
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)
        self.qkv = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 24)])
        away = (torch.arange(16)[:, None] - torch.arange(16)).abs()
        self.register_buffer("hidden", torch.zeros(16, 16).masked_fill(away > 5, -100.0))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for qkv in self.qkv:
            q, k, v = qkv(x).reshape(-1, 16, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + F.scaled_dot_product_attention(q, k, v, self.hidden).transpose(1, 2).reshape(-1, 16, 8)
        return self.head(x.mean(1))


def test_masks_of_neighbours_and_windows_are_refused() -> None:
    masked = traced_model.trace_model(_Masked().eval(), Architecture(name="masked", family="module"))
    rejects("adds a mask by token positions", traced_model.with_merging, masked, Merging(schedule=(1, 1)))
    for form in ("windows", "cosines"):
        reason = traced_model.merging_refusal(timm_models.checkpoint(form).model)
        assert "layers.0.blocks.0.attn sees windows of" in reason


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", ["halves turned, registers", "tables"])
def test_closed_loop_and_polish_repair_models_with_merged_positions(form: str) -> None:
    dense = timm_models.checkpoint(form).model
    model = traced_model.with_merging(dense, Merging(schedule=SCHEDULE))
    images = timm_models.opened(model, 64, 1)
    full = timm_models.method(mlp_sparsity=0.0, attention_sparsity=0.0)
    repaired = reduce_traced(model, images, full, loop=Loop()).model
    half = reduce_traced(model, images, timm_models.method(), loop=Loop())
    assert half.coverage.verdict == "4 of 6 sites reduced"
    pixels = tiny.images(64, 1)
    expected = tiny.ran(dense, pixels)
    before, after = (float((tiny.ran(each, pixels) - expected).norm()) for each in (model, repaired))
    assert after < 0.97 * before
    unrepaired = traced_model.with_merging(timm_models.reduced(form, "none").model, Merging(schedule=SCHEDULE))
    polish = polished(dense, unrepaired, images, PolishOptions(steps=1)).report
    assert polish.error < 0.9 * polish.error_before


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("form", "options", "bound"),
    [
        ("halves turned, registers", {}, 1e-5),
        ("neighbours turned, packed gate", {"metric": "attended"}, 1e-5),
        ("learned angles", {"how": "drop"}, 1e-5),
        ("tables", {"metric": "attended"}, 1e-5),
    ],
)
def test_graph_with_merged_positions_equals_torch(form: str, options: dict[str, Any], bound: float) -> None:
    model = traced_model.with_merging(timm_models.checkpoint(form).model, Merging(schedule=SCHEDULE, **options))
    require_merged_graph(graph_of(model), model, bound)


@pytest.mark.slow("graph", "engine")
@needs_rtx
@pytest.mark.parametrize("form", ["halves turned, registers", "neighbours turned, packed gate", "tables", "networks"])
def test_engine_with_merged_positions_keeps_every_fused_attention(tmp_path: Path, form: str) -> None:
    model = traced_model.with_merging(timm_models.checkpoint(form).model, Merging(schedule=SCHEDULE))
    save_onnx(graph_of(model, "fp16"), tmp_path / "merged.onnx")
    record = built(tmp_path / "merged.onnx", "1:8:16")
    assert record.attention_sites == record.fused_attention_sites == ("blocks.0.attn", "blocks.1.attn")
