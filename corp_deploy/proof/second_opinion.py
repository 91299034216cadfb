"""Inputs and golden outputs of a proof for Polygraphy, with the commands that repeat the proof's comparisons there.

Engines are left out: Polygraphy's loader lets a plan run its own code on the host.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.graph.ports import ports_of_graph
from ground.errors import BadInput, Missing
from ground.feeds import Feeds, Outputs, batch_size, select_rows
from ground.files import replacing, write_text
from ground.onnx_file import read_onnx
from perf.parity.link import Link

from .candidates import Candidate
from .outcome import Proof

SCRIPT, README = "compare.sh", "README.md"


def require_second_opinion(candidates: Sequence[Candidate]) -> None:
    """Raise Missing without Polygraphy, and BadInput if no candidate is a graph."""
    try:
        import polygraphy.json  # noqa: F401
    except ImportError as error:
        raise Missing("--polygraphy: Polygraphy is not installed; install the extra `interop`") from error
    if not any(each.form == "graph" for each in candidates):
        raise BadInput("--polygraphy: none of the candidates is an ONNX graph, which is what Polygraphy runs; give one")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The comparison of one graph with golden outputs; the names of its files begin with `stem`.

    `good` is the graph that it is compared with, or the graph itself if the reference is a torch model. `shapes` are
    those of the first batch, and `atol` bounds the mean absolute difference of each output.
    """

    graph: str
    good: str
    stem: str
    shapes: Mapping[str, Sequence[int]]
    atol: Mapping[str, float]

    def file(self, what: str) -> str:
        return f"{self.stem}.{what}.json"

    def run(self) -> str:
        bounds = [f"{name}:{bound:.6g}" for name, bound in self.atol.items()]
        return shlex.join([*_run(self.graph, self.file("inputs"), self.file("golden")), *bounds])

    def debug(self) -> list[str]:
        """Return the commands that compare tensors inside both graphs and cut out the failing part."""
        first, layers, both = map(self.file, ("first", "layers", "layers.inputs"))
        bound = f"{max(self.atol.values(), default=1e-5):.6g}"
        shapes = [f"{name}:[{','.join(map(str, shape))}]" for name, shape in self.shapes.items()]
        every = ["--onnx-outputs", "mark", "all"]
        kept = ["polygraphy", "run", self.good, "--onnxrt", *every, "--load-inputs", first, "--save-outputs"]
        cut = ["polygraphy", "debug", "reduce", self.graph, "-o", f"{self.stem}.smallest.onnx", "--mode", "bisect"]
        check = [*_run("polygraphy_debug.onnx", both, layers), bound]
        lines = [
            [*kept, layers],
            [*_run(self.graph, first, layers), bound, *every],
            ["polygraphy", "data", "merge", first, layers, "-o", both],
            [*cut, "--model-input-shapes", *shapes, "--load-inputs", both, "--check", *check],
        ]
        return [shlex.join(line) for line in lines]


def _run(model: str, inputs: str, golden: str) -> list[str]:
    files = ["--load-inputs", inputs, "--load-outputs", golden]
    return ["polygraphy", "run", model, "--onnxrt", *files, "--check-error-stat", "mean", "--rtol", "0", "--atol"]


def _renamed(arrays: Feeds | Outputs, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the arrays that the graph has, by its names; a single array for a single name is renamed."""
    if len(arrays) == 1 and len(names) == 1:
        return dict(zip(names, arrays.values(), strict=True))
    return {name: np.asarray(arrays[name]) for name in names if name in arrays}


def _iterations(arrays: Feeds | Outputs, batch: int, *, fixed: bool) -> list[dict[str, NDArray[Any]]]:
    """Split arrays into batches; the last batch is smaller, or filled up if the batch is fixed."""
    count, parts = batch_size(arrays), []
    for start in range(0, count, batch):
        rows = np.arange(start, start + batch if fixed else min(start + batch, count)).clip(max=count - 1)
        parts.append({name: np.ascontiguousarray(array) for name, array in select_rows(arrays, rows).items()})
    return parts


def _bounds(links: Sequence[Link], golden: Outputs, own: Sequence[str]) -> dict[str, float]:
    """Return the bound of each output's mean absolute difference over all inputs, by the graph's name of the output.

    If the mean relative error is at most e, this difference is at most e times the largest root mean square of an
    input's output.
    """
    bounds = {}
    for link in links:
        name = link.output or next(iter(golden))
        if link.tolerance.max_relative_error is None or name not in golden:
            continue
        rows = golden[name].reshape(len(golden[name]), -1).astype(np.float64)
        shown = own[0] if len(own) == 1 and len(golden) == 1 else name
        bounds[shown] = link.tolerance.max_relative_error * float(np.sqrt(np.square(rows).mean(1)).max())
    return bounds


def write_second_opinion(
    proof: Proof, candidates: Sequence[Candidate], feeds: Feeds, directory: Path, *, batch: int
) -> list[str]:
    """Write the inputs and golden outputs of every graph's link, a script and a README; return the script's commands.

    Batches have the size `batch`, or that of a graph with a fixed one. Raises Missing if Polygraphy is not installed.
    """
    require_second_opinion(candidates)
    directory.mkdir(parents=True, exist_ok=True)
    graphs = [each for each in candidates if each.form == "graph" and each.runtime is None]
    comparisons = [_written(proof, graphs, place, feeds, directory, batch) for place in range(len(graphs))]
    left_out = [str(each.path) for each in candidates if each.form == "engine"]
    lines = [each.run() for each in comparisons]
    write_text(directory / SCRIPT, "\n".join(["#!/bin/sh", "set -e", 'cd "$(dirname "$0")"', *lines, ""]))
    write_text(directory / README, _readme(comparisons, left_out))
    return lines


def _written(
    proof: Proof, graphs: Sequence[Candidate], place: int, feeds: Feeds, directory: Path, batch: int
) -> _Comparison:
    from polygraphy.comparator import RunResults
    from polygraphy.json import save_json
    from polygraphy.logger import G_LOGGER

    candidate = graphs[place]
    ports = ports_of_graph(read_onnx(candidate.path, weights=False))
    own_inputs, own_outputs = ([port.name for port in each] for each in ports)
    links = [each for each in proof.parity.links if each.candidate == candidate.label and each.kind != "whole"]
    reference = links[0].reference
    golden = proof.answers[reference]
    size, fixed = candidate.batch or batch, candidate.batch is not None
    fed = _iterations(_renamed(candidate.fed(feeds), own_inputs), size, fixed=fixed)
    answers = _iterations(_renamed(golden, own_outputs), size, fixed=fixed)
    before = next((each.path for each in graphs if each.label == reference), candidate.path)
    comparison = _Comparison(
        graph=os.path.relpath(candidate.path, directory),
        good=os.path.relpath(before, directory),
        stem=f"{place + 1}-{candidate.path.stem}",
        shapes={name: array.shape for name, array in fed[0].items()},
        atol=_bounds(links, golden, own_outputs),
    )
    results = RunResults()
    results.add(answers, runtime=[0.0] * len(answers), runner_name=reference)
    with G_LOGGER.verbosity(G_LOGGER.ERROR):
        for name, parts in (("inputs", fed), ("first", fed[:1])):
            with replacing(directory / comparison.file(name)) as temporary:
                save_json(parts, str(temporary))
        with replacing(directory / comparison.file("golden")) as temporary:
            results.save(str(temporary))
    return comparison


def _readme(comparisons: Sequence[_Comparison], left_out: Sequence[str]) -> str:
    runs = "\n".join(each.run() for each in comparisons)
    debugging = "\n\n".join("\n".join(each.debug()) for each in comparisons)
    engines = f"\nNot compared here: {', '.join(left_out)}.\n" if left_out else ""
    return f"""# The same comparison in Polygraphy

The inputs of `verify`, and for each graph the golden outputs of the step that `verify` compares it with. Run in this
directory; `sh {SCRIPT}` runs all commands and stops with a status other than 0 at the first graph that differs.

```sh
{runs}
```

`--trt` in place of `--onnxrt` builds an engine of the graph and compares that. Each output's bound is that of verify's
link, turned into a mean absolute difference: the bound of the relative error times the largest root mean square of an
output. Outputs within verify's bound over all inputs are within this one over all inputs; a single batch may exceed it.
On a CPU, ONNX Runtime computes FP16 graphs in float32, where nothing overflows; verify rounds to the graph's types.

If a command fails, the commands below save all tensors inside the reference graph (with `--trt` in the second command:
inside this graph itself), compare this graph's tensors with them to find the first that differs, and cut out the nodes
that fail, for which Polygraphy needs the package onnx-graphsurgeon.
`polygraphy debug build GRAPH --until 10 --check polygraphy run ...` tries an engine's tactics in the same way.

```sh
{debugging}
```

Don't load engines from others in Polygraphy: a plan can run its own code on this machine.
{engines}"""
