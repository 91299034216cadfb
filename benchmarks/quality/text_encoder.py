"""A pretrained 6-layer text encoder with little redundancy, where closed forms can gain least.

    python -m benchmarks.quality.text_encoder --output benchmarks/results/text_encoder.json

The encoder (12 heads of 32, MLPs 1,536 wide) is MiniLM of subjects.py. Errors are of the mean over the tokens, not
normalised, on held-out text.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import HELD_OUT_TEXTS, TOKENS, Subject, minilm
from benchmarks.quality.ways import Way, uniform_share, widths_by_site
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset

CASES = (("joint", 0.5), ("mlp", 0.5), ("attention", 0.5), ("joint", 0.3), ("joint", 0.7))


def method_of(way: Way, kind: str, sparsity: float) -> Method:
    """Return the method that removes the same share of every site; values stay."""
    mlp, attention = (None if kind == other else sparsity for other in ("attention", "mlp"))
    align: dict[str, Any] = {"align_hidden": 64 if way.by_site else 8, "align_head": 2, "geometry": "ragged"}
    return method_from_preset(way.preset, mlp_sparsity=mlp, attention_sparsity=attention, **align)


def reduced(way: Way, subject: Subject, kind: str, sparsity: float) -> nn.Module:
    """Return the reduced model."""
    method, widths = method_of(way, kind, sparsity), None
    if way.by_site:
        share = uniform_share(subject.dense.model, method_of(Way("uniform", "none"), kind, sparsity))
        widths = widths_by_site(subject, method, share)
    return way.reduced(subject, method, widths)


# Preset corp, the reference of all others, is first.
IN_EVERY_CASE = (
    Way("corp", "corp"),
    Way("best"),
    Way("best, closed loop", loop=Loop()),
    Way("none", "none"),
)
IN_THE_FIRST_CASE = (
    Way("best, closed loop, first layers not aligned", loop=Loop(align_inputs=False)),
    Way("best, same MACs by site", by_site=True),
    Way("best, same MACs by site, closed loop", loop=Loop(), by_site=True),
    Way("best, closed loop, layers polished", loop=Loop(), polished=True),
)


def ways_of(case: tuple[str, float]) -> Iterator[Way]:
    """Yield the methods of a case; some are tried only in the first one."""
    yield from IN_EVERY_CASE
    if case == CASES[0]:
        yield from IN_THE_FIRST_CASE


def measure(bench: Bench, facts: dict[str, Any], subject: Callable[[], Subject], case: tuple[str, float]) -> None:
    """Make the rows of one case."""
    key = {**facts, "kind": case[0], "sparsity": case[1]}

    def error_of(way: Way) -> dict[str, float]:
        error = subject().error(reduced(way, subject(), *case))
        corp = error if way.name == "corp" else bench.record.row("rows", key | {"method": "corp"})["error"]
        return {"error": error, "of_corp": error / corp}

    for way in ways_of(case):
        bench.row(key | {"method": way.name}, error_of, way)


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
