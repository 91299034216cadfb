"""Token merging in traced models: streams by loops over images, steps, graphs, loops, what is refused."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import timm
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

from corp_deploy.cli import main
from corp_deploy.families import traced_model
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.inspection import merging_record
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.layers import layered
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.module import TracedModule
from corp_deploy.traced.models.steps import Merge, StreamState
from corp_deploy.traced.models.token_merging import key_bias
from export.graph.to_onnx import onnx_from_model
from ground.errors import BadInput
from tests import timm_models, tiny

SCHEDULE = (3, 4)
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "class token": ({}, {"how": "drop"}, {"metric": "stream"}),
    "registers": ({"metric": "keys"}, {"how": "drop"}),
    "distilled": ({},),
    "mean": ({}, {"how": "drop"}),
    "attention pool": ({"metric": "keys"},),
    "no pool": ({}, {"unmerged": True}),
}


@cache
def merged(form: str, **options: Any) -> nn.Module:
    return traced_model.with_merging(timm_models.checkpoint(form).model, Merging(schedule=SCHEDULE, **options))


def outputs(model: nn.Module, count: int = 5, seed: int = 0) -> Tensor:
    return tiny.ran(model, tiny.images(count, seed))


def checkpoint_of(model: nn.Module, form: str) -> Checkpoint:
    return Checkpoint(model=model, architecture=timm_models.architecture(form), lineage={})


def merged_by_loops(x_NC: Tensor, sizes_N: list[float], protected: int, count: int) -> tuple[Tensor, list[float]]:
    """Of one image, by Ward's criterion, pair by pair."""
    even, odd = range(protected, len(x_NC), 2), range(protected + 1, len(x_NC), 2)

    def cost(one: int, other: int) -> float:
        n, m = sizes_N[one], sizes_N[other]
        return n * m / (n + m) * float((x_NC[one] - x_NC[other]).square().sum())

    into = {one: min(odd, key=lambda other: cost(one, other)) for one in even}
    gone = sorted(even, key=lambda one: cost(one, into[one]))[:count]
    sums, sizes = [x_NC[at] * sizes_N[at] for at in range(len(x_NC))], list(sizes_N)
    for one in gone:
        sums[into[one]] = sums[into[one]] + sums[one]
        sizes[into[one]] += sizes_N[one]
    order = [*range(protected), *(one for one in even if one not in gone), *odd]
    return torch.stack([sums[at] / sizes[at] for at in order]), [sizes[at] for at in order]


def test_the_streams_are_those_of_a_loop_over_images_and_pairs() -> None:
    vit: Any = timm_models.checkpoint("registers").model
    expected = []
    with torch.no_grad():
        for image in torch.from_numpy(tiny.images(3)).split(1):
            x_1NC = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(image))))
            sizes_N = [1.0] * x_1NC.shape[1]
            for block, count in zip(vit.blocks, SCHEDULE, strict=True):
                attention, entering = block.attn, block.norm1(x_1NC)
                qkv = attention.qkv(entering).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
                scores = qkv[0] @ qkv[1].transpose(-2, -1) * attention.scale + torch.tensor(sizes_N).log()
                mixed = (scores.softmax(-1) @ qkv[2]).transpose(1, 2).flatten(2)
                x_1NC = x_1NC + block.ls1(attention.proj(mixed))
                x_NC, sizes_N = merged_by_loops(x_1NC[0], sizes_N, vit.num_prefix_tokens, count)
                x_1NC = x_NC[None]
                x_1NC = x_1NC + block.ls2(block.mlp(block.norm2(x_1NC)))
            expected.append(vit.forward_head(vit.norm(x_1NC)))
    torch.testing.assert_close(outputs(merged("registers"), 3), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", ["class token", "distilled"])
def test_a_reduced_model_that_merges_is_written_and_read(form: str, tmp_path: Path) -> None:
    model = merged(form)
    moments = calibrate(checkpoint_of(model, form), timm_models.opened(model), batch_size=8, statistics=Statistics())
    reduced = reduce(model, moments, timm_models.method()).model
    save(checkpoint_of(reduced, form), tmp_path)
    again = load_checkpoint(tmp_path).model
    assert traced_model.merging_of(again) == Merging(schedule=SCHEDULE)
    assert torch.equal(outputs(again), outputs(reduced))


def test_a_model_gives_all_its_tokens_back() -> None:
    dense = timm_models.checkpoint("mean").model
    again = traced_model.with_merging(merged("mean"), None)
    assert traced_model.merging_of(again) is None
    torch.testing.assert_close(outputs(again), outputs(dense), rtol=1e-6, atol=1e-6)


@pytest.mark.slow("graph")
@pytest.mark.parametrize(("form", "options"), [("mean", {}), ("registers", {"how": "drop"})])
def test_a_graph_gives_torchs_outputs_at_any_batch(form: str, options: dict[str, Any]) -> None:
    model = merged(form, **options)
    ports = traced_model.input_spec(model).ports, traced_model.output_ports(model)
    proto = onnx_from_model(traced_model.exportable(model), *ports, precision="fp32", metadata={})
    assert not {node.op_type for node in proto.graph.node} & {"ScatterElements", "ScatterND", "NonZero", "If", "Loop"}
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for count in (1, 5):
        (got,) = session.run(None, {"images": tiny.images(count)})
        np.testing.assert_allclose(got, outputs(model, count).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow("models")
@pytest.mark.parametrize(("options", "left"), [({}, 0.9), ({"how": "drop"}, 0.96)])
def test_a_closed_loop_repairs_what_merging_changed(options: dict[str, Any], left: float) -> None:
    """At full width, on images of the fit: the dense model's outputs are nearer than without a repair."""
    model, dense = merged("mean", **options), timm_models.checkpoint("mean").model
    full = timm_models.method(mlp_sparsity=0.0, attention_sparsity=0.0)
    repaired = reduce_traced(model, timm_models.opened(model, 64, 1), full, loop=Loop()).model
    assert traced_model.merging_of(repaired) == traced_model.merging_of(model)
    expected = outputs(dense, 64, 1)
    before, after = (float((outputs(each, 64, 1) - expected).norm()) for each in (model, repaired))
    assert after < left * before


class _Windows(nn.Module):
    """Tokens of two windows, each seen by those of its own."""

    input_size = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).reshape(-1, 2, 8, 3, 2, 4).permute(3, 0, 1, 4, 2, 5).flatten(1, 2).unbind(0)
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 16, 8)
        given: Tensor = (x + self.out(z)).mean(1)
        return given


class _Positioned(nn.Module):
    """Two attentions, positions added behind the first."""

    input_size = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)
        self.qkv = nn.ModuleList([nn.Linear(8, 24), nn.Linear(8, 24)])
        self.places = nn.Parameter(torch.randn(1, 16, 8))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for qkv in self.qkv:
            q, k, v = qkv(x + self.places).reshape(-1, 16, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 16, 8)
        given: Tensor = self.head(x.mean(1))
        return given


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convnet": (lambda: timm.create_model("resnet10t"), "no attention of tokens is found"),
    "windows": (_Windows, "added to no stream of its tokens, as in windows"),
    "positions behind the first block": (_Positioned, "add in the model takes something with a place for every token"),
    "rotary": (
        lambda: timm.create_model("eva02_tiny_patch14_224", depth=2, embed_dim=48, num_heads=3, img_size=28),
        "slice in blocks.1.attn reads all tokens at once, or some by where they stand",
    ),
    "relative positions": (
        lambda: timm.create_model("beit_base_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=32),
        "blocks.1.attn adds to scores by where tokens stand or masks them",
    ),
    "branches side by side": (lambda: timm_models.checkpoint("one layer for all").model, "other branches carry"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_every_token_is_refused_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    model = make().eval()
    if not isinstance(model, TracedModule):
        model = traced_model.traced(model, Architecture(name=name, family="module"))
    with pytest.raises(BadInput, match=reason):
        traced_model.with_merging(model, Merging(schedule=(1, 1)))
    assert reason in traced_model.merging_refusal(model)


@pytest.mark.parametrize(("form", "options"), [(form, each) for form, every in FORMS.items() for each in every])
def test_steps_and_layers_cut_by_cut_give_the_models_outputs(form: str, options: dict[str, Any]) -> None:
    model, images = merged(form, **options), torch.from_numpy(tiny.images(5))
    with torch.inference_mode():
        walk = StreamState.of(traced_model.embedded(model, images), None)
        for step in traced_model.steps(model):
            walk = walk.behind(step)
        (given,) = traced_model.answers(model, walk, images)
        pieces, layers = layered(model)
        torch.testing.assert_close(given, outputs(model), rtol=0, atol=0)
        torch.testing.assert_close(pieces(images), outputs(model), rtol=0, atol=0)
    assert [step.name for step in traced_model.steps(model) if isinstance(step, Merge)] == [
        "blocks.0.merge",
        "blocks.1.merge",
    ]
    assert {f"blocks.{block}.mlp.fc1" for block in range(2)} <= {layer.name for layer in layers}


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    model = timm_models.checkpoint("class token").model
    with pytest.raises(BadInput, match="a schedule of 3 entries for 2 blocks"):
        traced_model.with_merging(model, Merging(schedule=(1, 1, 1)))
    with pytest.raises(BadInput, match="block 0 has 17 tokens, 1 of them protected"):
        traced_model.with_merging(model, Merging(schedule=(9, 1)))


def test_a_key_of_several_tokens_counts_as_these() -> None:
    scores_BHNN = torch.randn(1, 1, 2, 3, generator=torch.Generator().manual_seed(0))
    sizes_BN = torch.tensor([[1.0, 3.0, 1.0]])
    repeated = scores_BHNN[..., [0, 1, 1, 1, 2]].softmax(-1)
    shares = (scores_BHNN + key_bias(sizes_BN, torch.float32)).softmax(-1)
    torch.testing.assert_close(shares[..., 1], repeated[..., 1:4].sum(-1))


def _transformers(directory: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTMSNConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    torch.manual_seed(0)
    model = transformers.ViTMSNForImageClassification(config).eval()
    tiny.enliven(model, 0)
    model.save_pretrained(directory)


@pytest.mark.slow("models")
def test_a_vit_of_transformers_merges(tmp_path: Path) -> None:
    _transformers(tmp_path)
    model = load_dense(f"hf:{tmp_path}", weights=None, kwargs={}).model
    few = traced_model.with_merging(model, Merging(schedule=(3, 4)))
    assert traced_model.token_kinds(model) == ("class", *["patch"] * 16)
    record = merging_record(few)
    assert record is not None
    assert record.tokens == (17, 14, 10)
    assert record.macs < record.macs_with_all_tokens
    assert 0.0 < float((outputs(few) - outputs(model)).norm() / outputs(model).norm()) < 0.5


def invoked(*words: object) -> str:
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


@pytest.mark.slow("graph")
def test_commands_merge_in_a_vit_of_transformers(tmp_path: Path) -> None:
    _transformers(tmp_path / "hf")
    np.save(tmp_path / "images.npy", tiny.images(48))
    np.save(tmp_path / "held-out.npy", tiny.images(16, seed=5))
    model, asked = ("--model", f"hf:{tmp_path / 'hf'}"), ("--merge-tokens", 3)
    moments, reduced, graph, record = (tmp_path / each for each in ("moments.st", "reduced", "m.onnx", "parity.json"))
    invoked("calibrate", *model, "--images", tmp_path / "images.npy", *asked, "-o", moments)
    invoked("reduce", *model, "--moments", moments, *asked, "--mlp", 0.5, "--align", "mlp=8,head=8", "-o", reduced)
    said = json.loads(invoked("inspect", "--model", reduced, "--json"))
    assert said["merging"]["tokens"] == [17, 14, 11]
    invoked("export", "--model", reduced, "-o", graph)
    held_out = ("--images", tmp_path / "held-out.npy", "--batch", "1,5", "--max-error", 2.0, "--min-agreement", 0.0)
    invoked("verify", *model[1:], reduced, graph, *held_out, "-o", record)
    assert {link["status"] for link in json.loads(record.read_text())["links"]} == {"PASS"}
