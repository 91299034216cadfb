"""`inspect` of models without a family of their own: sites, their costs, and reasons why layers stay."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from corp_deploy.families.counting import macs
from corp_deploy.families.inspection import traced_rows
from corp_deploy.families.module_facts import facts_of_module
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.first_plan import compute_first_plan, refuse_far_cuts
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.store.checkpoint import dense_from_architecture
from corp_deploy.traced.models.module import traced_module
from ground.errors import BadInput
from tests.command import invoked, refuses
from tests.refusals import rejects
from tests.traced_examples import CODE, PVT

# A ViT whose patches take half of its multiply-adds.
STEM = Architecture(
    name="vit_tiny_patch16_224",
    kwargs={"img_size": 64, "patch_size": 32, "embed_dim": 64, "num_heads": 1, "depth": 2, "num_classes": 0},
)
DIM, HIDDEN, HEADS = 48, 192, 3


def inspected(*words: str) -> dict[str, object]:
    result = invoked("inspect", *words, "--json")
    record: dict[str, object] = json.loads(result.stdout)
    return record


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    (tmp_path / "own.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return ("--model", "module:own.py:make", "--trust-code")


def test_module_without_declarations_has_sites(own: Sequence[str]) -> None:
    record = inspected(*own)
    sites = {row["site"]: row for row in record["sites"]}  # type: ignore[attr-defined]
    blocks = [f"h.{block}{site}" for block in range(2) for site in (".attn.qk", ".attn.v", "")]
    assert list(sites) == ["stem", *blocks]
    assert sites["h.0"]["width"] == f"channels {HIDDEN}"
    assert sites["h.0"]["parameters"] == 2 * DIM * HIDDEN + HIDDEN
    assert sites["h.0"]["macs"] == 16 * 2 * DIM * HIDDEN
    assert sites["h.1.attn.v"]["width"] == f"values {DIM}, 16 in each of {HEADS}"
    # The values' rows of the fused layer, the product with the attention weights, and the output projection.
    assert sites["h.1.attn.v"]["macs"] == 16 * DIM * DIM + 16 * 16 * DIM + 16 * DIM * DIM
    assert record["fixed"][-1]["name"] == "head"  # type: ignore[index]
    assert sites["stem"]["macs"] == 256 * 27 * 24 + 16 * 24 * 16 * DIM
    rows = [*record["sites"], *record["fixed"]]  # type: ignore[misc]
    for figure in ("parameters", "macs"):
        assert sum(row[figure] for row in rows) == record[figure]
    reasons = {stay["reason"]: stay["layers"] for stay in record["stays"]}  # type: ignore[attr-defined]
    assert reasons["it is an output of the model"] == ["head"]
    assert "stem.3" in reasons["layer_norm in h.0.ln_1 (LayerNorm) mixes it"]


def test_timm_name_is_inspected_without_weights() -> None:
    record = inspected("--model", PVT.name, "--model-kwargs", json.dumps(dict(PVT.kwargs)))
    widths = [row["width"] for row in record["sites"]]  # type: ignore[attr-defined]
    assert widths[:3] == ["queries and keys 16", "values 16", "channels 64"]
    assert widths[3:] == ["queries and keys 32, 16 in each of 2", "values 32, 16 in each of 2", "channels 128"]


@pytest.mark.parametrize("kind", ["vit", "bert", "llama", pytest.param("convnext", marks=pytest.mark.slow("models"))])
def test_transformers_configuration_is_inspected_without_weights(kind: str, tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    configs: dict[str, dict[str, object]] = {
        "vit": {**small, "model_type": "vit", "image_size": 32, "patch_size": 8, "architectures": ["ViTModel"]},
        "bert": {**small, "model_type": "bert", "vocab_size": 50, "max_position_embeddings": 32},
        "llama": {**small, "model_type": "llama", "vocab_size": 50, "architectures": ["LlamaForCausalLM"]},
        "convnext": {"model_type": "convnext", "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    }
    config = configs[kind]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": config.get("architectures")}))
    record = inspected("--model", f"hf:{tmp_path}")
    assert len(record["sites"]) == (4 if kind == "convnext" else 6)  # type: ignore[arg-type]
    assert 0 < record["plan"]["offered"] < 1  # type: ignore[index]


@pytest.mark.slow("models")
def test_torchvision_name_is_inspected_without_weights() -> None:
    assert inspected("--model", "torchvision:squeezenet1_1")["plan"]["sites"] > 0  # type: ignore[index]


def test_plan_shows_what_a_budget_removes_and_keeps() -> None:
    """A ViT's attention and MLPs lose what the budget asks, and patch embedding and classifier stay."""
    patches, tokens, width, hidden, classes = 196, 197, 192, 768, 1000
    embedding, head = patches * 768 * width, width * classes
    of_width, of_tokens = 4 * tokens * width * width + 2 * tokens * width * hidden, 2 * tokens * tokens * width
    total = embedding + head + 2 * (of_width + of_tokens)
    arguments = ("--model", "vit_tiny_patch16_224", "--model-kwargs", '{"depth": 2}')
    plan = inspected(*arguments)["plan"]
    assert isinstance(plan, dict)
    assert plan["offered"] == pytest.approx(2 * (of_width + of_tokens) / total)
    assert plan["cut"] == math.ceil(100 * 0.3 / plan["offered"]) / 100
    stays = {row["name"]: row["share"] for row in plan["stays"]}
    assert stays["patch_embed.proj"] == pytest.approx(embedding / total)
    assert stays["head"] == pytest.approx(head / total)
    assert inspected(*arguments, "--macs", "0.05")["plan"]["cut"] is None  # type: ignore[index]


class Halves(nn.Module):
    """A model in which half of the inputs of `last` can go, and the others come from an unknown kind of layer."""

    input_size = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.free, self.bound = (nn.Conv2d(*sizes, 3, padding=1) for sizes in ((3, 16), (16, 8), (16, 8)))
        self.up, self.last = nn.ConvTranspose2d(8, 8, 1), nn.Conv2d(16, 12, 3, padding=1)
        self.head = nn.Conv2d(12, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.first(images))
        both = torch.cat([functional.relu(self.free(x)), self.up(functional.relu(self.bound(x))).sigmoid()], 1)
        out: Tensor = self.head(functional.relu(self.last(both))).flatten(1)
        return out


def test_shares_of_partly_removable_layers_add_up() -> None:
    model = traced_module(Halves(), facts_of_module(Halves(), Preprocessing()))
    rows, fixed = traced_rows(model, macs(model))
    assert sum(row["macs"] for row in (*rows, *fixed)) == pytest.approx(macs(model), rel=1e-3)
    plan = compute_first_plan(model, method_from_preset("best", conv_sparsity=0.5), 0.7, 1.0)
    assert plan.offered + sum(share for _, share, _ in plan.stays) == pytest.approx(1.0)


def test_unreachable_budget_is_refused_before_any_work() -> None:
    model = dense_from_architecture(STEM)
    method = ReduceOptions(macs=0.6).method_asked
    share = round(1.0 - 0.95 * compute_first_plan(model, method, 0.9, 0.85).offered, 2)
    plan = compute_first_plan(model, method, share, 0.85)
    assert plan.cut == pytest.approx(0.95, abs=0.02)
    assert plan.stays[0][0] == "patch_embed.proj"
    with pytest.raises(BadInput) as refused:
        refuse_far_cuts(model, method, "macs", share, 0.85)
    said = str(refused.value)
    assert f"takes {plan.cut:.2f} of every site that it may cut, evenly, where 0.85 is the most" in said
    assert f"patch_embed.proj {plan.stays[0][1]:.0%} (layer_norm in blocks.0.norm1 (LayerNorm) mixes it)" in said
    assert f"keep more (--macs {plan.least:g}), or allow it: --most-cut {plan.cut:g}" in said
    refuse_far_cuts(model, method, "macs", share, plan.cut or 1.0)
    refuse_far_cuts(model, method, "macs", plan.least, 0.85)
    rejects(r"evenly, where 0\.85", refuse_far_cuts, model, method, "macs", plan.least - 0.01, 0.85)


def test_module_of_unknown_input_size_says_what_to_declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(5, 3)\n")
    monkeypatch.chdir(tmp_path)
    result = invoked("inspect", "--model", "module:own.py:make", "--trust-code", code=2)
    assert "it runs with no known size of images" in result.output
    assert "input_size = (3, height, width)" in result.output


def test_unknown_family_is_refused() -> None:
    rejects("has no builder in this family", dense_from_architecture, Architecture(name="any", family="traced"))


def test_untraceable_module_reports_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\nclass Odd(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(8, 8)\n\n    def forward(self, x):\n"
        "        x = self.layer(x.flatten(1)[:, :8])\n"
        "        return x if x.is_meta or x.sum().item() > 0 else -x\n\ndef make():\n    return Odd()\n"
    )
    monkeypatch.chdir(tmp_path)
    refuses("Odd can't be traced", "inspect", "--model", "module:own.py:make", "--trust-code")
