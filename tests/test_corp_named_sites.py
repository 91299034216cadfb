"""Users' own modules: declared sites, their checks against the program, and trust in the code that builds a module."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import corp_deploy
from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs
from corp_deploy.families.family import image_spec, sites_of
from corp_deploy.families.given_module import architecture_of_code, build_from_code
from corp_deploy.families.inspection import traced_rows
from corp_deploy.families.module_facts import facts_of_module
from corp_deploy.planning.request import sentences_on_spared
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.spec.architecture import Preprocessing
from corp_deploy.spec.trusted_code import Code, trusting_code
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.module import traced_module
from corp_deploy.traced.models.narrowed_model import at_widths
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.values import TracedValues
from examples.own_module.net import Net
from tests import tiny
from tests.command import invoked, refuses
from tests.recipes import recipe
from tests.refusals import rejects

ROOT = Path(__file__).parents[1]
SOURCE = (ROOT / "examples" / "own_module" / "net.py").read_text()
MIX = {"qkv": "to_qkv", "proj": "out", "heads": 3}


def net(depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Net(depth=depth).eval()


def named(model: nn.Module, **changes: Any) -> nn.Module:
    declared: dict[str, Any] = {
        "mlps": {"layers.0.ffn": ("0", "2"), "layers.1.ffn": ("0", "2")},
        "attentions": {f"layers.{i}.mix": MIX for i in range(2)},
    }
    return corp_deploy.sites(model, **{"inputs": (3, 32, 32), **declared, **changes})


def outputs(model: nn.Module, count: int = 6) -> Tensor:
    return tiny.ran(model, tiny.images(count, seed=4))


def test_naming_sites_changes_neither_outputs_nor_the_module() -> None:
    model = net()
    before = outputs(model)
    ours = named(model)
    torch.testing.assert_close(outputs(ours), before, rtol=1e-5, atol=1e-5)
    assert torch.equal(outputs(model), before)
    assert type(model).__name__ == "Net"
    assert not any(module._forward_hooks for module in (*model.modules(), *ours.modules()))
    assert [site.name for site in sites_of(ours).every] == ALL_SITES
    assert traced_model.classes(ours) == 5


ALL_SITES = [f"layers.{i}.{part}" for i in range(2) for part in ("mix.qk", "mix.v", "ffn")]


def test_only_named_sites_are_offered_and_reduced(tmp_path: Path) -> None:
    """A declaration of all sites equals no declaration; layers outside declared sites keep their shapes."""
    every, one = named(net()), named(net(), mlps={"layers.1.ffn": ("0", "2")}, attentions={})
    unnamed = Net()
    unnamed.load_state_dict(net().state_dict())
    unnamed.input_size = (3, 32, 32)  # type: ignore[assignment]
    free = traced_module(unnamed, facts_of_module(unnamed, Preprocessing()))
    assert [site.name for site in sites_of(free).every] == ALL_SITES
    assert [site.name for site in sites_of(one).every] == ["layers.1.ffn"]
    assert [row["site"] for row in traced_rows(one, macs(one))[0]] == ["layers.1.ffn"]
    reduced = [halved(model, tmp_path, attention_sparsity=0.5, align_head=8).model for model in (free, every, one)]
    assert {name: list(each.shape) for name, each in reduced[0].state_dict().items()} == {
        name: list(each.shape) for name, each in reduced[1].state_dict().items()
    }
    assert torch.equal(outputs(reduced[0]), outputs(reduced[1]))
    narrower = [name for name, each in one.state_dict().items() if reduced[2].state_dict()[name].shape != each.shape]
    assert narrower == ["layers.1.ffn.0.weight", "layers.1.ffn.0.bias", "layers.1.ffn.2.weight"]
    assert [site.name for site in sites_of(reduced[2]).every] == ["layers.1.ffn"], (
        "a reduced one offers them alone, too"
    )
    again = named(one, mlps={}, **mix())
    assert [site.name for site in sites_of(again).every] == ALL_SITES[:2]


class Turning(nn.Module):
    """An MLP with a branch on the value of a pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3072, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        out: Tensor = self.layers(x if float(x[0, 0]) > 0 else -x)
        return out


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.idle = nn.Linear(3072, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.one(images.flatten(1)).relu()
        return self.other(x), x


class Twice(nn.Module):
    """An MLP that is called twice, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.idle = nn.Conv2d(3, 16, 8, stride=8), nn.Linear(32, 16)
        self.ffn = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.cut(images).flatten(2).mT
        for _ in range(2):
            x = x + self.ffn(x)
        return x.mean(1)


def mlp(path: str, *layers: str) -> dict[str, Any]:
    return {"mlps": {path: layers}, "attentions": {}}


def mix(path: str = "layers.0.mix", **changes: Any) -> dict[str, Any]:
    return {"attentions": {path: MIX | changes}}


NORMED = {"flat": nn.Flatten(), "first": nn.Linear(3072, 16), "between": nn.LayerNorm(16), "last": nn.Linear(16, 4)}
REFUSED: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "a name": (net(), {"mlps": {"layers.7.ffn": ("0", "2")}}, "the model has no module 'layers.7.ffn.0'"),
    "a layer": (net(), {"mlps": {"layers.0.ffn": ("0", "1")}}, "layers.0.ffn.1 is SiLU, expected a linear layer"),
    "names": (net(), {"mlps": {"layers.0.ffn": ("0",)}}, "expected the names of its linear layers inside it"),
    "heads": (net(), mix(heads=5), "got 5 heads, the program has 3; give 3"),
    "a scale": (net(), mix(scale=3.0), "got scale 3.0, the program scales by 0.25"),
    "nothing": (net(), {"mlps": {}, "attentions": {}}, "none named"),
    "a norm": (
        nn.Sequential(OrderedDict(NORMED)),
        mlp("", "first", "last"),
        r"no channels between first and last can be reduced: layer_norm in between \(LayerNorm\) mixes it",
    ),
    "no pair": (
        net(),
        mlp("layers", "0.ffn.0", "1.ffn.2"),
        "can be reduced: layers.0.ffn.0 gives channels, which layers.0.ffn.2 reads; leave it out",
    ),
    "no attention": (
        net(),
        mix("layers.0.ffn", qkv="0", proj="2"),
        "no values between layers.0.ffn.0 and layers.0.ffn.2 can be reduced: layers.0.ffn.0 gives channels",
    ),
    "another projection": (
        net(),
        mix("layers", qkv="0.mix.to_qkv", proj="1.mix.out"),
        "layers.0.mix.to_qkv gives queries and keys and values, which layers.0.mix.out reads; leave it out",
    ),
    "never called": (Twice(), mlp("", "ffn.0", "idle"), "idle is never called"),
    "values": (Turning(), mlp("layers", "0", "2"), "Turning can't be traced: it looks at values"),
    "several tensors": (Several(), mlp("", "one", "other"), "it gives output_0, output_1, expected one tensor"),
    "another size": (net(), {"inputs": (4, 32, 32)}, r"Net can't be run on images \[4, 32, 32\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_false_declarations_are_refused(case: str) -> None:
    model, declared, words = REFUSED[case]
    rejects(words, named, model, **declared)


def halved(model: nn.Module, folder: Path, **changes: Any) -> Reduction:
    """Halve the widths of a model's MLPs, calibrated on 64 images."""
    moments = calibrate(checkpoint(model), tiny.opened(folder / "images.npy", tiny.images(64), model), batch_size=32)
    return reduce(model, moments, method_from_preset("best", mlp_sparsity=0.5, align_hidden=8, **changes))


def checkpoint(model: nn.Module) -> Checkpoint:
    code = Code(file="net.py", function="build", source=SOURCE)
    return Checkpoint(model=model, architecture=architecture_of_code(code, {}, Preprocessing()), lineage={})


class Fused(nn.Module):
    """A gated MLP with one layer for gates and values."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = nn.Linear(3072, 32), nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        gate, x = self.both(images.flatten(1)).chunk(2, dim=-1)
        out: Tensor = self.last(gate.sigmoid() * x)
        return out


@pytest.mark.parametrize(
    ("module", "mlps", "words"),
    [(Fused(), {"": ("both", "last")}, "gated channels 16"), (Twice(), {"ffn": ("0", "2")}, "channels 32")],
)
def test_sites_of_the_program_are_found_and_exact(
    module: nn.Module, mlps: dict[str, tuple[str, ...]], words: str, tmp_path: Path
) -> None:
    """Channels with zero weights behind them are removed without a change of the outputs."""
    model = corp_deploy.sites(module.double().eval(), inputs=(3, 32, 32), mlps=mlps, output="embedding")
    assert [each.dtype for each in model.parameters()][:1] == [torch.float32]
    assert traced_model.classes(model) == 0
    (site,) = sites_of(model).every
    assert site.describe() == words
    with torch.no_grad():
        model.get_parameter("last.weight" if "" in mlps else "ffn.2.weight")[:, ::2] = 0.0
    reduced = halved(model, tmp_path).model
    assert [each.width for each in sites_of(reduced).every] == [site.width // 2]
    torch.testing.assert_close(outputs(reduced), outputs(model), rtol=1e-4, atol=1e-4)


class Attention(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.cut, self.norm = form, nn.Conv2d(3, 32, 8, stride=8), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(images).flatten(2).mT
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        if self.form == "normed":
            q = self.norm(q)
        if self.form == "before":
            q, k = q * 0.2, k * 0.5
        scale = {"said": 0.3, "before": 1.0}.get(self.form)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=self.form == "masked", scale=scale)
        out: Tensor = self.proj(x.transpose(1, 2).flatten(2)).mean(1)
        return out


SCALES = {"plain": 0.25, "said": 0.3, "before": 0.1, "masked": 0.25, "normed": None}


@pytest.mark.parametrize(("form", "scale"), SCALES.items())
def test_declared_scale_is_checked_against_the_program(form: str, scale: float | None) -> None:
    def sites(**more: object) -> nn.Module:
        declared = {"qkv": "qkv", "proj": "proj", "heads": 2, **more}
        return corp_deploy.sites(Attention(form), inputs=(3, 32, 32), attentions={"": declared})

    assert [site.kind.removeprefix("traced ") for site in sites_of(sites()).every] == (
        ["values"] if scale is None else ["queries and keys", "values"]
    )
    words = "otherwise than by one number" if scale is None else f"the program scales by {scale:g}; leave `scale` out"
    rejects(words, sites, scale=0.26)
    if scale is not None:
        assert len(sites_of(sites(scale=scale)).every) == 2


def test_queries_and_keys_find_their_values_in_any_layout(tmp_path: Path) -> None:
    """The attention's layers are the whole network's; removing all values removes queries and keys, too."""
    torch.manual_seed(0)
    net, inputs = nn.Sequential(Attention("plain")).eval(), torch.randn(40, 3, 32, 32)
    calibration = corp_deploy.calibrate(net, inputs, tmp_path / "m.safetensors")
    apart, square = (
        corp_deploy.reduce(net, calibration, tmp_path / heads, attn=0.5, heads=heads, align={"head": 8})
        for heads in ("padded", "square")
    )
    queries = next(site for site in sites_of(apart.model).every if isinstance(site, TracedPairs))
    values = next(site for site in sites_of(apart.model).every if isinstance(site, TracedValues))
    assert (queries.dims, values.beside, values.tied) == (8, queries.name, queries.tied)
    stream, *both = sites_of(square.model).every
    assert [(site.name, site.width) for site in both] == [(queries.name, 16), (values.name, 16)]
    assert sentences_on_spared(square.model, {values.name: 0, stream.name: 8}) == ()
    assert not sites_of(at_widths(square.model, {values.name: 0})).every


def test_user_code_runs_only_if_trusted(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SOURCE)
    model = ("--model", f"module:{tmp_path / 'net.py'}:build")
    refuses("net.py is code, which would be run to make the model: read it, and give --trust-code", "inspect", *model)
    assert "layers.1.mix" in invoked("inspect", *model, "--trust-code").output


def test_reduced_module_needs_trust_but_not_its_file(tmp_path: Path) -> None:
    with trusting_code(True):
        model = build_from_code(checkpoint(net()).architecture)
    reduction = halved(model, tmp_path)
    save(checkpoint(reduction.model), tmp_path / "reduced")
    refuses("give --trust-code", "export", "--model", tmp_path / "reduced", "-o", tmp_path / "model.onnx")
    loaded = corp_deploy.load(tmp_path / "reduced", trust_code=True)
    assert torch.equal(outputs(loaded), outputs(reduction.model))
    rejects(r"net\.py is code", corp_deploy.load, tmp_path / "reduced")
    config = json.loads((tmp_path / "reduced" / "config.json").read_text())
    assert (config["family"], config["architecture"]["kwargs"]["source"]) == ("module", SOURCE)
    assert str(tmp_path) not in (tmp_path / "reduced" / "config.json").read_text()


BAD = (
    SOURCE
    + """

def bare() -> nn.Module:
    return nn.Bilinear(3, 3, 3)


def wrong() -> int:
    return 3
"""
)
FAULTS = {
    "net.py": "expected module:PATH.py:FUNCTION",
    "other.py:build": "no such file",
    "net.py:nothing": "it has no function 'nothing'",
    "net.py:wrong": "wrong() gives a int, expected a torch.nn.Module",
    "net.py:bare": "its forward takes input1, input2; declare its `inputs`",
}


def test_arguments_are_kept_and_invalid_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(BAD)
    for name, reason in FAULTS.items():
        refuses(reason, "inspect", "--model", f"module:{tmp_path / name}", "--trust-code")
    model = ("--model", f"module:{tmp_path / 'net.py'}:build", "--trust-code", "--model-kwargs")
    assert "layers.2.mix" in invoked("inspect", *model, '{"depth": 3}').output
    refuses("net.py: build() fails (TypeError", "inspect", *model, '{"width": 3}')


RECIPE = recipe(
    {
        "model": {"model": "module:net.py:build"},
        "calibration": {"images": "images.npy"},
        "reduce": {"mlp": 0.5, "align_mlp": 8},
        "parity": {"max_error": 0.9},
    }
)


@pytest.mark.slow("graph")
def test_recipe_code_needs_trust_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SOURCE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    np.save(tmp_path / "images.npy", tiny.images(48))
    np.save(tmp_path / "held-out.npy", tiny.images(8, seed=1))
    words = ("release", tmp_path / "recipe.toml", "-o", tmp_path / "out")
    message = invoked(*words, code=2).stderr
    assert (
        "model.model: net.py is code, which would be run to make the model: read it, and give --trust-code" in message
    )
    assert not (tmp_path / "out" / "dense").exists()
    invoked(*words, "--trust-code")
    config = json.loads((tmp_path / "out" / "reduced" / "config.json").read_text())
    assert config["architecture"]["name"] == "net.py:build"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    printed = {entry["made_by"] for entry in manifest["files"].values()} | {manifest["command"]}
    judging = {command for command in printed if command.startswith("corp-deploy gate ")}
    assert len(printed) > 6
    assert all("--trust-code" in command for command in printed - judging), printed
    resolved = (tmp_path / "out" / "recipe.toml").read_text()
    assert 'model = "module:../net.py:build"' in resolved
    assert str(tmp_path) not in resolved
    assert "nothing to do" in invoked(*words, "--trust-code").output
    (tmp_path / "net.py").write_text(f"{SOURCE}\n")
    assert "nothing to do" not in invoked(*words, "--trust-code", "--dry-run").output
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("[model]", "[model]\ntrust_code = true"))
    assert "unknown key 'trust_code'" in invoked(*words, code=2).stderr, "a recipe can't grant it"


GREY = """
from torch import nn

import corp_deploy


def build():
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 4))
    return corp_deploy.sites(nn.Sequential(layers), inputs=(1, 8, 8), mlps={"0": ("1", "3")})


def timms():
    import timm

    return timm.create_model("test_vit", in_chans=1)
"""


def test_grey_module_uses_only_its_declared_mean(tmp_path: Path) -> None:
    (tmp_path / "grey.py").write_text(GREY)
    name = f"module:{tmp_path / 'grey.py'}:build"
    with trusting_code(True):
        spec = image_spec(load_dense(name, weights=None, kwargs={}).model)
        assert not {"mean", "std"} & spec.as_json().keys()
        given = Preprocessing(mean=(0.1,), std=(0.2,))
        taken = load_dense(name, weights=None, kwargs={}, preprocessing=given)
        assert image_spec(taken.model).as_json()["mean"] == [0.1]
        save(load_dense(name, weights=None, kwargs={}), tmp_path / "dense")
        assert image_spec(load_checkpoint(tmp_path / "dense").model).as_json() == spec.as_json()
        timms = load_dense(f"module:{tmp_path / 'grey.py'}:timms", weights=None, kwargs={}).model
    plain: Any = timm.create_model("test_vit")
    assert image_spec(timms).as_json()["crop_pct"] == plain.pretrained_cfg["crop_pct"]
    linear, mean = nn.Linear(8, 8), (0.1, 0.2, 0.3)
    rejects("mean has 3 numbers, expected 1", corp_deploy.sites, linear, inputs=(1, 8, 8), mlps={}, mean=mean)


def test_page_shows_the_example_unchanged() -> None:
    page = (ROOT / "docs" / "how-to" / "own-module.md").read_text()
    shown = page.split("```text\n")[1].split("```")[0]
    signature, call = shown.split("    net = Net(depth=depth)\n")
    assert "corp_deploy.sites(" in call
    assert signature in SOURCE
    assert call in SOURCE
    assert len(shown.strip().splitlines()) <= 10
