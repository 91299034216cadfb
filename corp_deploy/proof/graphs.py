"""The graphs or packages of one export; the layers that mixed and quantised graphs keep in more bits are found once."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from corp_deploy.families.family import output_ports
from corp_deploy.families.traced_model import has_uneven_heads
from corp_deploy.invocation.export_choice import ExportOptions, QuantisedOptions
from corp_deploy.invocation.table import EXPORT_HEADS
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint, graph_ports, paths_by_precision
from corp_deploy.store.package_file import export_package
from corp_deploy.store.quantised_onnx import Quantisation, export_quantised, quantiser_of
from export.graph.quantiser import Quantiser
from export.graph.to_onnx import require_size
from ground.feeds import Feeds
from ground.precision import PRECISIONS, QUANTISED

from .engine_search import RepairResult, run_in_engine
from .kept_sites import find_sites_to_keep, find_sites_to_leave, measure_quantised_bounds
from .model_inputs import feeds_for_graph


class Graphs:
    """The graphs (or packages) that an export writes, one for each precision.

    `feeds` are the inputs on which layers to keep in more bits are chosen. `dense` is the model whose own rounding
    error bounds that of the graphs, by default the model itself. Raises BadInput if the option for head geometry has no
    effect on the model, which the message calls `where`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: ExportOptions,
        feeds: Feeds | None,
        *,
        dense: Checkpoint | None = None,
        where: str = "the model",
        command: str = "",
    ) -> None:
        if options.heads is not None:
            way = "uneven" if has_uneven_heads(checkpoint.model) else "even"
            EXPORT_HEADS.refuse([(where, way)], {"heads": options.heads})
        graph_ports(checkpoint, options.graph_input)
        for name in options.precisions if options.format == "onnx" else ():
            require_size(checkpoint.model, name)
        self._checkpoint, self._dense = checkpoint, dense or checkpoint
        self._options, self._optional_feeds = options, feeds
        self._command = command
        self._chosen = Quantisation(**QuantisedOptions.from_options(options.values).values)

    @property
    def _feeds(self) -> Feeds:
        assert self._optional_feeds is not None, self._options
        return self._optional_feeds

    @cached_property
    def _fed(self) -> Feeds:
        return feeds_for_graph(self._checkpoint, self._feeds, self._options.graph_input)

    @property
    def _shape(self) -> dict[str, Any]:
        options = self._options
        return {"batch": options.batch, "geometry": options.heads, "graph_input": options.graph_input}

    @cached_property
    def _made_of(self) -> Quantiser:
        return quantiser_of(self._checkpoint, self._fed, self._chosen, opset=self._options.opset, **self._shape)

    def _judged_by(self, feeds: Feeds) -> dict[str, Any]:
        options = self._options
        if options.engine is None:
            return {}
        engines = run_in_engine(options.engine, feeds, output_ports(self._checkpoint.model), self._command)
        return {"engines": engines, "breaks": options.breaks}

    @cached_property
    def found(self) -> Mapping[str, RepairResult]:
        options = self._options
        if not options.auto:
            return {name: RepairResult(kept=tuple(options.keep_fp32)) for name in options.mixed}
        return {
            name: find_sites_to_keep(
                self._checkpoint,
                self._dense,
                self._feeds,
                opset=options.opset,
                geometry=options.heads,
                float_type=PRECISIONS[name].type,
                keep_fp32=options.keep_fp32,
                **self._judged_by(self._feeds),
            )
            for name in options.mixed
        }

    @property
    def _idle(self) -> dict[str, str]:
        """The pure precision by mixed precision, for those mixed ones that need no layer in FP32."""
        return {name: PRECISIONS[name].pure for name, found in self.found.items() if not found.kept}

    def paths(self, output: Path) -> dict[str, Path]:
        """Return the path of each graph by precision; a mixed precision without layers to keep becomes the pure one."""
        idle = self._idle
        if len(self._options.precisions) == 1:
            (only,) = self._options.precisions
            return {idle.get(only, only): output}
        every = paths_by_precision(output, (*self._options.precisions, *idle.values()))
        return {name: path for name, path in every.items() if name not in idle}

    def write(self, name: str, path: Path) -> tuple[str, ...]:
        """Write the graph of precision `name`; return the modules, or their patterns, that it keeps in more bits."""
        options = self._options
        if options.format == "aoti":
            export_package(self._checkpoint, path, precision=name, device=options.device, **self._shape)
            return ()
        if name in QUANTISED:
            found = RepairResult()
            if options.auto:  # finds sites that are too sensitive to quantise, and fusion breaks for engines
                bounds, by = measure_quantised_bounds(self._dense, name, self._feeds), self._judged_by(self._fed)
                made_of, chosen = self._made_of, self._chosen
                found = find_sites_to_leave(self._checkpoint, made_of, name, chosen, self._fed, bounds, **by)
            chosen = replace(self._chosen, keep_rest=(*self._chosen.keep_rest, *found.kept))
            breaks = (*options.breaks, *found.breaks)
            export_quantised(self._made_of, path, precision=name, chosen=chosen, breaks=breaks)
            return chosen.keep_rest
        mixed = next((mixed for mixed, pure in self._idle.items() if pure == name), name)
        found = self.found.get(mixed, RepairResult())
        export_checkpoint(
            self._checkpoint,
            path,
            precision=name,
            opset=options.opset,
            keep_fp32=found.kept,
            breaks=(*options.breaks, *found.breaks),
            **self._shape,
        )
        return found.kept
