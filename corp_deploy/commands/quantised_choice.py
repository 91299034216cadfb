"""How INT8 and FP8 graphs are made, as it is said on the command line."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .graph_choice import GraphChoice
from .input_choice import InputChoice
from .options import command_line, value_options

if TYPE_CHECKING:
    from corp_deploy.proof.engine_search import Mended
    from corp_deploy.store.checkpoint import Checkpoint
    from corp_deploy.store.quantised_onnx import Quantisation
    from export.graph.quantiser import Quantiser
    from ground.feeds import Feeds


def _quantised_choice(weight_bits: str, **options: Any) -> "Quantisation":
    from corp_deploy.store.quantised_onnx import Quantisation

    return Quantisation(**options, weight_bits=int(weight_bits))


quantised_options = value_options(
    "quantisation",
    _quantised_choice,
    click.option(
        "--rest",
        type=click.Choice(["fp16", "bf16", "fp32"]),
        default="fp16",
        show_default=True,
        help="For int8 and fp8: the precision of all between the quantised layers; ONNX Runtime on a CPU is fast with "
        "fp32.",
    ),
    click.option(
        "--scales",
        type=click.Choice(["auto", "max", "mse", "entropy"]),
        default="auto",
        show_default=True,
        help="For int8 and fp8: where the ranges of activations end; auto takes the one whose outputs are nearest to "
        "FP32.",
    ),
    click.option(
        "--balance/--no-balance",
        default=True,
        show_default=True,
        help="For int8 and fp8: move outliers from norms into the weights behind them (SmoothQuant), exactly.",
    ),
    click.option(
        "--keep-rest",
        multiple=True,
        help="For int8 and fp8: modules that are left in --rest, with all below them, such as blocks.7.mlp.",
    ),
    click.option(
        "--weight-bits",
        type=click.Choice(["8", "7"]),
        default="8",
        show_default=True,
        help="For int8: how many bits of a weight are used; with 7 no sum of sixteen bits overflows, which those of "
        "CPUs without VNNI do.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class YardstickChoice:
    """Whether the most sensitive blocks are looked for, whose error is the yardstick, by default its own, and which
    backend's engines are judged, by default none but the graphs.
    """

    searches: bool
    dense: Path | None
    engine: str | None = None


class QuantisedGraphs:
    """The INT8 and FP8 graphs of one export, whose ranges are taken once."""

    def __init__(
        self,
        checkpoint: "Checkpoint",
        inputs: InputChoice,
        chosen: "Quantisation",
        graphs: GraphChoice,
        yardstick: YardstickChoice,
    ) -> None:
        self._checkpoint, self._source, self._chosen = checkpoint, inputs.open(checkpoint), chosen
        self._graphs, self._yardstick = graphs, yardstick

    @cached_property
    def _feeds(self) -> "Feeds":
        from corp_deploy.proof.inputs import inputs_from_set

        return inputs_from_set(self._source).feeds

    @cached_property
    def _fed(self) -> "Feeds":
        """The same as the graphs take them."""
        from corp_deploy.proof.pixels import fed_to_graph

        return fed_to_graph(self._checkpoint, self._feeds, self._graphs.graph_input)

    @cached_property
    def _made_of(self) -> "Quantiser":
        from corp_deploy.store.quantised_onnx import quantiser_of

        asked: dict[str, Any] = {
            "opset": self._graphs.opset,
            "batch": self._graphs.batch,
            "geometry": self._graphs.heads,
        }
        asked["graph_input"] = self._graphs.graph_input
        return quantiser_of(self._checkpoint, self._fed, self._chosen, **asked)

    def written(self, precision: str, path: Path) -> dict[str, Any]:
        """Write one graph; what it is, for people and machines."""
        from corp_deploy.store.onnx_file import facts_of_onnx
        from corp_deploy.store.quantised_onnx import export_quantised
        from ground.files import sha256_of_file

        found = self._found(precision)
        chosen = replace(self._chosen, keep_rest=(*self._chosen.keep_rest, *found.kept))
        breaks = (*self._graphs.break_fusion, *found.breaks)
        export_quantised(self._made_of, path, precision=precision, chosen=chosen, breaks=breaks)
        facts = facts_of_onnx(path)
        record = {"path": str(path), "precision": precision, "opset": facts.opset, "rest": facts.rest}
        record |= {"scales": facts.scales, "kept_rest": list(chosen.keep_rest)}
        record |= {"weight_bits": facts.weight_bits} if facts.weight_bits != 8 else {}
        record |= {"fusion_breaks": list(facts.fusion_breaks)} if facts.fusion_breaks else {}
        record |= {"normalised": facts.normalised} if facts.normalised else {}
        return {**record, "sha256": sha256_of_file(path), "size_bytes": path.stat().st_size}

    def _found(self, precision: str) -> "Mended":
        """The sites that are not quantised because they are too sensitive, and where an engine's fusion is broken."""
        from corp_deploy.families.family import output_ports
        from corp_deploy.proof.engine_search import Mended, engine_answers
        from corp_deploy.proof.quantised_precision import bounds_of, mended_quantised, sites_to_leave
        from corp_deploy.store.dense_model import model_of_directory

        if not self._yardstick.searches:
            return Mended()
        dense = self._yardstick.dense
        own = self._checkpoint if dense is None else model_of_directory(dense)
        bounds = bounds_of(own, precision, self._feeds)
        asked = (self._checkpoint, self._made_of, precision, self._chosen, self._fed, bounds)
        if self._yardstick.engine is None:
            return Mended(kept=sites_to_leave(*asked, batch=self._graphs.batch).sites)
        answers = engine_answers(
            self._yardstick.engine, self._fed, output_ports(self._checkpoint.model), command_line()
        )
        return mended_quantised(*asked, answers, breaks=self._graphs.break_fusion)
