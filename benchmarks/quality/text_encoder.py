"""A pretrained 6-layer text encoder with little redundancy: the methods where closed forms have the least to gain.

    python -m benchmarks.quality.text_encoder --output benchmarks/results/text_encoder.json

The encoder (12 heads of 32, MLPs 1,536 wide) is MiniLM of subjects.py. Errors are of the tokens' mean, not normalised,
on held-out text.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import HELD_OUT_TEXTS, TOKENS, Subject, minilm
from corp_deploy.families.counting import macs
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.plan import make_plan
from corp_deploy.planning.request import build_request
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce

CASES = (("joint", 0.5), ("mlp", 0.5), ("attention", 0.5), ("joint", 0.3), ("joint", 0.7))


@dataclass(frozen=True, slots=True)
class Variant:
    """A column of the table; `by_site` spends the MACs of uniform widths by the error curves; `layers`: polished."""

    name: str
    preset: str = "best"
    loop: Loop | None = None
    by_site: bool = False
    layers: bool = False

    def method(self, kind: str, sparsity: float) -> Method:
        """Return the method that removes the same share of every site; values stay."""
        mlp, attention = (None if kind == other else sparsity for other in ("attention", "mlp"))
        align: dict[str, Any] = {"align_hidden": 64 if self.by_site else 8, "align_head": 2, "geometry": "ragged"}
        return method_from_preset(self.preset, mlp_sparsity=mlp, attention_sparsity=attention, **align)

    def reduced(self, subject: Subject, kind: str, sparsity: float) -> nn.Module:
        """Return the reduced model."""
        model, texts, method, widths = subject.dense.model, subject.inputs, self.method(kind, sparsity), None
        if self.by_site:
            uniform = reduce(model, subject.moments, Variant("uniform", "none").method(kind, sparsity)).model
            asked = replace(build_request(ReduceOptions(macs=macs(uniform) / macs(model))), method=method)
            widths = make_plan(subject.dense, subject.moments, asked, texts).widths
        if self.loop is None:
            return reduce(model, subject.moments, method, widths=widths).model
        looped = reduce_traced(model, texts, method, widths=widths, loop=self.loop).model
        return polished(model, looped, texts, PolishOptions()).model if self.layers else looped


# Preset corp, which all others are compared with, is first.
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


def variants_of(case: tuple[str, float]) -> Iterator[Variant]:
    """Every method in every case, some in the first one alone."""
    yield from IN_EVERY_CASE
    if case == CASES[0]:
        yield from IN_THE_FIRST_CASE


def measure(bench: Bench, facts: dict[str, Any], subject: Callable[[], Subject], case: tuple[str, float]) -> None:
    """Make the rows of one case."""
    key = {**facts, "kind": case[0], "sparsity": case[1]}

    def error_of(variant: Variant) -> dict[str, float]:
        error = subject().error(variant.reduced(subject(), *case))
        corp = error if variant.name == "corp" else bench.record.row("rows", key | {"method": "corp"})["error"]
        return {"error": error, "of_corp": error / corp}

    for variant in variants_of(case):
        bench.row(key | {"method": variant.name}, error_of, variant)


@measures("benchmarks/text-encoder")
def main(bench: Bench) -> None:
    """Measure and write the record."""
    bench.share(held_out_texts=HELD_OUT_TEXTS)
    for seed, (size, cases) in product((0, 1), ((312, CASES), (800, CASES[:1]))):
        with tempfile.TemporaryDirectory() as scratch:
            subject = cache(partial(minilm, Path(scratch), size, HELD_OUT_TEXTS, seed=seed))
            for case in cases:
                measure(bench, {"seed": seed, "calibration_tokens": size * TOKENS}, subject, case)


if __name__ == "__main__":
    main()
