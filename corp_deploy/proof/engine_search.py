"""What lets an engine say what its graph says: fusion breaks first, and sites kept in more bits only where those fail.

A graph that is right in itself can become an engine that is not, by a fused kernel that is wrong; only the engine shows
it. A break costs a write of one tensor, float32 costs a block its fast kernels.
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

from .candidates import candidate_from_path, outputs_at

BATCH = 16
Answers = Callable[[Path], Outputs]
Write = Callable[[Path, Sequence[str], Sequence[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """Fusion breaks, and sites kept in more bits."""

    breaks: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def fewest_passing(sites: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> tuple[str, ...] | None:
    """A set of these that passes, of which none can be left out; None where not even all of them pass.

    Takes for granted that more pass where fewer do: the last site of the shortest passing row is needed, and so on with
    those before it, each found by bisection.
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


def output_measures(
    ports: Sequence[OutputPort], reference: Outputs, answers: Outputs, bounds: Mapping[str, Tolerance] | None = None
) -> dict[str, Measures]:
    """Compare answers with the reference, by output; `bounds` know the noise of margins."""
    return {
        port.name: measure_outputs(
            reference[port.name],
            answers[port.name],
            role=port.role,
            margin_noise=0.0 if bounds is None else bounds[port.name].margin_noise,
        )
        for port in ports
    }


def offered(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Return places for breaks in order: the softmax of every attention, and the output of every part of a block."""
    parts = {site for name in modules_of_graph(proto) if (site := site_of(f"{name}/")) == name}
    parts = {site for site in parts if any(part.isdigit() for part in site.split("."))}
    nodes = [node.name for node in proto.graph.node if node.op_type == "Softmax" and "/" in node.name]
    return breakable_sites(proto, (*sorted(parts), *nodes))


@dataclass(kw_only=True)
class Trials:
    """Graphs of one model with other breaks and other sites kept, each made and judged once, by `bounds` (by output)
    against `reference`: `write` makes one (path, breaks, kept sites), `answers` is what it says, or its engine.
    `are_flips`: whether every change of the first class counts, however near two are.
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
            self.measured[key] = output_measures(self.ports, self.reference, self.last, noise)
        return self.measured[key]

    def error(self, breaks: Sequence[str] = (), kept: Sequence[str] = ()) -> float:
        """Return the error of the worst output."""
        return max(each.relative_error for each in self.errors(breaks, kept).values())

    def failing(self, breaks: Sequence[str] = (), kept: Sequence[str] = ()) -> str | None:
        """Return the first output that doesn't pass, None where all do."""
        errors = self.errors(breaks, kept)
        return next(
            (name for name, each in errors.items() if judge_measures(each, self.bounds[name])[0] != "PASS"), None
        )


def mended(trials: Trials) -> RepairResult:
    """The fewest breaks that let the engine pass; where no break helps, the fewest sites kept. Raises BadInput where
    neither helps.
    """
    trials.errors()
    sites = offered(read_onnx(trials.graph))
    blocks = tuple(site for site in sites if "/" not in site)
    breaks = fewest_passing(sites, lambda some: trials.failing(breaks=some) is None)
    kept: tuple[str, ...] | None = ()
    if breaks is None:
        breaks, kept = (), fewest_passing(blocks, lambda some: trials.failing(kept=some) is None)
    if kept is None:
        raise BadInput(
            f"no set of fusion breaks, and no set of blocks in more bits, mends this engine: it is still off by "
            f"{trials.error(kept=blocks):.2g}; export fp32, or build with another version"
        )
    return RepairResult(breaks=breaks, kept=kept)


def graph_answers(path: Path, feeds: Feeds, ports: Sequence[OutputPort]) -> Outputs:
    """Run a graph in ONNX Runtime, rounding as it is typed."""
    with candidate_from_path(path).opened(ports) as run:
        return outputs_at(run, feeds, BATCH)


def engine_answers(backend: str, feeds: Feeds, ports: Sequence[OutputPort], command: str) -> Answers:
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
