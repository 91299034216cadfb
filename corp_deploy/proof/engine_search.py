"""Repairs of engines: fusion breaks first, and sites kept in more bits only if breaks fail.

A wrong fused kernel can make an engine err although its graph is right; only running the engine shows it. A break costs
one write of a tensor; with more bits a block loses its fast kernels.
"""

import tempfile
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from export.engine.build import build_engine, write_engine
from export.engine.options import BatchProfile, BuildOptions
from export.graph.fusion_breaks import breakable_sites, modules_of_graph
from ground.errors import BadInput, Missing
from ground.feeds import Feeds, Outputs, batch_size
from ground.gpu import require_cuda
from ground.onnx_file import read_onnx
from ground.ports import OutputPort
from perf.parity.block_outputs import site_of
from perf.parity.measures import Measures, measure_outputs
from perf.parity.tolerance import Tolerance, judge_measures

from .candidates import candidate_from_path, run_in_batches

BATCH = 16
Answers = Callable[[Path], Outputs]
Write = Callable[[Path, Sequence[str], Sequence[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """The fusion breaks and the sites in more bits with which a graph or engine passes."""

    breaks: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def find_fewest_passing(sites: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> tuple[str, ...] | None:
    """Return a set of sites that passes and needs each of them, or None if not even all sites pass.

    A set is assumed to pass if any subset does. Then the last site of the shortest prefix that passes is needed;
    bisection finds it, and after it the other needed sites in the same way.
    """
    if not passes(sites):
        return None
    chosen: tuple[str, ...] = ()
    left = list(sites)
    while not passes(chosen):
        rows = [(*left[:count], *chosen) for count in range(1, len(left))]
        needed = bisect_left(rows, True, key=passes)
        chosen, left = (left[needed], *chosen), left[:needed]
    return chosen


def measure_each_output(
    ports: Sequence[OutputPort], reference: Outputs, answers: Outputs, bounds: Mapping[str, Tolerance] | None = None
) -> dict[str, Measures]:
    """Return each output's measures against the reference; by `bounds`, classes too close don't count as changed."""
    return {
        port.name: measure_outputs(
            reference[port.name],
            answers[port.name],
            role=port.role,
            margin_noise=0.0 if bounds is None else bounds[port.name].margin_noise,
        )
        for port in ports
    }


def find_break_places(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Return the names of modules in blocks, and of softmax nodes, whose outputs fusion can be broken at."""
    parts = {site for name in modules_of_graph(proto) if (site := site_of(f"{name}/")) == name}
    parts = {site for site in parts if any(part.isdigit() for part in site.split("."))}
    nodes = [node.name for node in proto.graph.node if node.op_type == "Softmax" and "/" in node.name]
    return breakable_sites(proto, (*sorted(parts), *nodes))


@dataclass(kw_only=True)
class Trials:
    """Trials of one model's graph with different breaks and kept sites, each written and measured once.

    `write` takes a path, breaks and kept sites and writes the graph; `answers` runs it, or an engine of it. Outputs are
    compared with `reference` and judged by `bounds`. With `are_flips` every change of the predicted class counts, even
    between classes that are nearly equal.
    """

    write: Write
    answers: Answers
    reference: Outputs
    ports: Sequence[OutputPort]
    bounds: Mapping[str, Tolerance]
    graph: Path
    are_flips: bool = False
    last: Outputs = field(default_factory=dict)
    measured: dict[tuple[frozenset[str], frozenset[str]], dict[str, Measures]] = field(default_factory=dict)

    def errors(self, breaks: Sequence[str] = (), kept: Sequence[str] = ()) -> dict[str, Measures]:
        key = frozenset(breaks), frozenset(kept)
        if key not in self.measured:
            self.write(self.graph, breaks, kept)
            self.last = self.answers(self.graph)
            noise = None if self.are_flips else self.bounds
            self.measured[key] = measure_each_output(self.ports, self.reference, self.last, noise)
        return self.measured[key]

    def error(self, breaks: Sequence[str] = (), kept: Sequence[str] = ()) -> float:
        """Return the largest relative error of any output with these breaks and kept sites."""
        return max(each.relative_error for each in self.errors(breaks, kept).values())

    def failing(self, breaks: Sequence[str] = (), kept: Sequence[str] = ()) -> str | None:
        """Return the name of the first output that doesn't pass with these breaks and kept sites, None if all do."""
        errors = self.errors(breaks, kept)
        return next(
            (name for name, each in errors.items() if judge_measures(each, self.bounds[name])[0] != "PASS"), None
        )


def find_repair(trials: Trials) -> RepairResult:
    """Find the fewest breaks with which the engine passes, or if no breaks help, the fewest kept sites.

    Raises BadInput if neither helps.
    """
    trials.errors()
    sites = find_break_places(read_onnx(trials.graph))
    blocks = tuple(site for site in sites if "/" not in site)
    breaks = find_fewest_passing(sites, lambda some: trials.failing(breaks=some) is None)
    kept: tuple[str, ...] | None = ()
    if breaks is None:
        breaks, kept = (), find_fewest_passing(blocks, lambda some: trials.failing(kept=some) is None)
    if kept is None:
        raise BadInput(
            f"no set of fusion breaks, and no set of blocks in more bits, repairs this engine: it still errs by "
            f"{trials.error(kept=blocks):.2g}; export fp32, or build with another version"
        )
    return RepairResult(breaks=breaks, kept=kept)


def run_graph(path: Path, feeds: Feeds, ports: Sequence[OutputPort]) -> Outputs:
    """Run a graph in ONNX Runtime, with values rounded to the graph's types."""
    with candidate_from_path(path).opened(ports) as run:
        return run_in_batches(run, feeds, BATCH)


def run_in_engine(backend: str, feeds: Feeds, ports: Sequence[OutputPort], command: str) -> Answers:
    """Return a function that builds an engine of a graph here and runs it; raise Missing without a GPU."""
    try:
        require_cuda()
    except Missing as error:
        raise Missing(
            f"--engine builds and runs engines, which takes a GPU ({error}); run this where the GPU is, or leave "
            "--engine out: --auto then judges the graphs"
        ) from error

    def answers(graph: Path) -> Outputs:
        batch = min(BATCH, batch_size(feeds))
        profile = BatchProfile(smallest=batch, tuned=batch, largest=batch)
        with tempfile.TemporaryDirectory() as scratch:
            plan = Path(scratch) / "tried.plan"
            write_engine(build_engine(graph, BuildOptions(backend=backend, profiles=(profile,), command=command)), plan)
            with replace(candidate_from_path(plan), label=backend, batch=batch).opened(ports) as run:
                return run(feeds)

    return answers
