"""Which blocks an INT8 or FP8 graph leaves as they are: the fewest of the most sensitive ones that let it pass."""

import tempfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import onnx
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.quantised_onnx import Quantisation, export_quantised
from export.graph.quantised import layers, simulated
from export.graph.quantiser import Quantiser
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, feeds_of_ports
from ground.ports import OutputPort
from ground.precision import type_by_name
from perf.parity import tolerance
from perf.parity.block_outputs import site_of
from perf.parity.measures import Measures
from perf.parity.tolerance import Tolerance
from perf.runners.module import ModuleRunner

from .candidates import Candidate, outputs_at
from .engine_search import Answers, RepairResult, first_failing, measured, mended, worst_error

BATCH = 16


def sites_to_leave(
    checkpoint: Checkpoint,
    made_of: Quantiser,
    precision: str,
    chosen: Quantisation,
    feeds: Feeds,
    bounds: Mapping[str, Tolerance],
    batch: int | None,
) -> RepairResult:
    """Sites in the order of what quantising each alone costs; the fewest of the first ones whose leaving lets the graph
    pass `bounds` (by output) against its FP32 twin, found by bisection and made sure of.

    What `chosen` keeps stays kept. Raises BadInput when not even one quantised site passes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        ports = output_ports(checkpoint.model)
        trial = _Trial(made_of, precision, chosen, feeds, ports, Path(scratch), batch)
        errors = trial.errors(())
        if first_failing(errors, bounds) is None:
            return RepairResult(relative_error=worst_error(errors))
        alone = {
            site: worst_error(trial.errors([each for each in trial.sites if each != site])) for site in trial.sites
        }
        order = sorted(alone, key=lambda site: (-alone[site], site))

        def passes(count: int) -> bool:
            return first_failing(trial.errors(order[:count]), bounds) is None

        most = len(order) - 1
        if most < 1 or not passes(most):
            least = order[-1]
            raise BadInput(
                f"{precision}: no set of blocks left in {chosen.rest} lets this graph pass: with {least} alone "
                f"quantised it is still off by {alone[least]:.2g}; export {chosen.rest}"
            )
        kept = tuple(order[: 1 + bisect_left(range(1, most), True, key=passes)])  # more pass where fewer do
        return RepairResult(kept=kept, relative_error=worst_error(trial.errors(kept)))


def mended_quantised(
    checkpoint: Checkpoint,
    made_of: Quantiser,
    precision: str,
    chosen: Quantisation,
    feeds: Feeds,
    bounds: Mapping[str, Tolerance],
    answers: Answers,
    breaks: Sequence[str],
) -> RepairResult:
    """The same, judged by what engines of the graphs say (`answers`): fusion breaks are tried before sites are left as
    they are, beside those that are there in any case.
    """
    ports = output_ports(checkpoint.model)

    def write(path: Path, sites: Sequence[str], left: Sequence[str]) -> None:
        patterns = [each for site in left for each in (site, f"{site}.*")]
        keeping = replace(chosen, keep_rest=(*chosen.keep_rest, *_fitting(made_of, patterns)))
        export_quantised(made_of, path, precision=precision, chosen=keeping, breaks=(*breaks, *sites))

    with tempfile.TemporaryDirectory() as scratch:
        single = Path(scratch) / "single.onnx"
        onnx.save(made_of.fp32_graph, str(single))
        step = Candidate(label="fp32", name="fp32", form="graph", path=single, float_type=type_by_name("fp32"))
        with step.opened(ports) as run:
            reference = outputs_at(run, feeds, BATCH)
        return mended(write, answers, reference=reference, ports=ports, bounds=bounds, scratch=Path(scratch))


def _fitting(made_of: Quantiser, patterns: Sequence[str]) -> tuple[str, ...]:
    """The modules of quantised layers that these patterns mean: a site need not have any."""
    modules = dict.fromkeys(layer.module for layer in layers(made_of.fp32_graph))
    return tuple(name for name in modules if any(fnmatchcase(name, pattern) for pattern in patterns))


def bounds_of(dense: Checkpoint, precision: str, feeds: Feeds) -> dict[str, Tolerance]:
    """By output twice what plain rounding does to the dense model, as `verify` judges it."""
    exportable, ports = traced_model.exportable(dense.model), output_ports(dense.model)

    def run(model: nn.Module) -> Outputs:
        inputs = input_ports(dense.model)
        with ModuleRunner(model, inputs=inputs, outputs=ports, label=precision) as runner:
            return outputs_at(lambda part: runner(feeds_of_ports(part, inputs)), feeds, BATCH)

    exact, rounded = run(exportable), run(simulated(exportable, precision, run))
    float_type = type_by_name(precision)
    return {
        name: tolerance.half(each, float_type=float_type, factor=2.0)
        for name, each in measured(ports, exact, rounded).items()
    }


class _Trial:
    """Graphs of one model with other sites left as they are, against the FP32 one on the same inputs."""

    def __init__(
        self,
        made_of: Quantiser,
        precision: str,
        chosen: Quantisation,
        feeds: Feeds,
        ports: Sequence[OutputPort],
        scratch: Path,
        batch: int | None,
    ) -> None:
        self._made_of, self._precision, self._chosen = made_of, precision, chosen
        self._feeds, self._ports, self._path = feeds, ports, scratch / "graph.onnx"
        self._modules = {layer.module: site_of(layer.node) for layer in layers(made_of.fp32_graph)}
        self._batch = batch
        self._measured: dict[frozenset[str], Mapping[str, Measures]] = {}
        self._reference = self._run(made_of.fp32_graph, "fp32")
        self.sites = tuple(dict.fromkeys(self._modules.values()))

    def errors(self, left: Sequence[str]) -> Mapping[str, Measures]:
        """By output, with these sites left as they are."""
        key = frozenset(left)
        if key not in self._measured:
            keep = [*self._chosen.keep_rest, *(module for module, site in self._modules.items() if site in key)]
            chosen = self._chosen
            proto = self._made_of.graph(
                self._precision, scales=chosen.scales, keep=keep, weight_bits=chosen.weight_bits
            )
            self._measured[key] = measured(self._ports, self._reference, self._run(proto, self._precision))
        return self._measured[key]

    def _run(self, proto: onnx.ModelProto, precision: str) -> Outputs:
        onnx.save(proto, str(self._path))
        rest = self._made_of.rest_precision
        float_type = type_by_name(precision)
        step = Candidate(
            label=precision, name=precision, form="graph", path=self._path, float_type=float_type, rest=rest
        )
        fixed = None if precision == "fp32" else self._batch
        with replace(step, batch=fixed).opened(self._ports) as run:
            return outputs_at(run, self._feeds, BATCH)
