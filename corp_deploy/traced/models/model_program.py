"""A model's program with all that is found in it, each searched once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor, fx, nn

from corp_deploy.spec.merging import Merging
from corp_deploy.traced.finding.product import count_node_macs
from corp_deploy.traced.finding.shares import Shares, compute_shares
from corp_deploy.traced.finding.sites import FoundSites, find_sites
from corp_deploy.traced.narrowing.proof import NarrowedProgram
from corp_deploy.traced.narrowing.whole_removal import WholeRemoval, remove_sites
from corp_deploy.traced.programs.attention_masks import unread_queries
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import CONV2D, LINEAR, Layer, build_listening_graph, can_be_observed, layers

from .mergeable import Mergeable, find_mergeable
from .merged_program import MergedProgram
from .mlp_merging import TokenMlp, build_mlp_merged_program, find_token_mlps
from .segments import CutOutputs, ProgramSegment, find_cut_outputs, find_segments
from .sites import Sites


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached properties
class Tracing:
    """A model's program with all that is found in it.

    `added`: the biases of zeros that the model itself lacks; those in `biasless` stay zeros. `multiple`: see Facts.
    `merging`: that of the residual stream; `mlp_merging`: that for MLPs alone, which sites, segments and statistics
    don't see. `offered`: the Sites, once searched. `proved`: the last narrowed program, if any. `folded_to_constant`:
    the tracings without sites that are folded to constants.
    """

    program: Program
    added: tuple[str, ...]
    biasless: frozenset[str] = frozenset()
    multiple: int = 1
    merging: Merging | None = None
    mlp_merging: Merging | None = None
    offered: list[Sites] = field(default_factory=list, init=False)
    proved: list[NarrowedProgram] = field(default_factory=list, init=False)
    folded_to_constant: dict[tuple[WholeRemoval, ...], "Tracing"] = field(default_factory=dict, init=False)

    def without(self, places: tuple[WholeRemoval, ...], inputs: list[Tensor]) -> "Tracing":
        """Return the tracing without these sites, built once."""
        if places not in self.folded_to_constant:
            self.folded_to_constant[places] = replace(self, program=remove_sites(self.program, places, inputs))
        return self.folded_to_constant[places]

    def again(self) -> "Tracing":
        """Return a copy with the same program and sites, and nothing else that was found."""
        new = replace(self)
        vars(new)["analysis"] = self.analysis
        return new

    @cached_property
    def mergeable(self) -> Mergeable | str:
        """The blocks where tokens can be merged, or the reason why they can't."""
        return find_mergeable(self.program)

    @cached_property
    def token_mlps(self) -> tuple[TokenMlp, ...]:
        return find_token_mlps(self.program)

    @cached_property
    def merged(self) -> MergedProgram | None:
        """The program that merges tokens; None if the model merges none."""
        if self.merging is None:
            return None
        assert isinstance(self.mergeable, Mergeable), self.mergeable
        return self.mergeable.merged(self.program, self.merging)

    @property
    def followed(self) -> Program:
        """The program with the residual stream that runs, and with MLPs of all its tokens."""
        return self.program if self.merged is None else self.merged.program

    @cached_property
    def running(self) -> Program:
        """The program that runs, with tokens merged if the model merges any."""
        own = self.mlp_merging
        return self.followed if own is None else build_mlp_merged_program(self.program, own)

    def merge_before(self, name: str) -> nn.Module | None:
        """Return the last merge before a node of this name; None if the node has all tokens."""
        return None if self.merged is None else self.merged.merge_at.get(name)

    @cached_property
    def analysis(self) -> FoundSites:
        return find_sites(self.program)

    @cached_property
    def segments(self) -> tuple[ProgramSegment, ...]:
        return find_segments(self.analysis, self.merged)

    @cached_property
    def cut_outputs(self) -> tuple[CutOutputs, ...]:
        return find_cut_outputs(self.analysis, self.merged)

    @cached_property
    def shares(self) -> Shares:
        if self.running is self.program:
            return compute_shares(self.analysis, aside=self.added)
        now = {node.name: node for node in self.running.nodes}
        costs = {node: count_node_macs(now[node.name]) if cost else 0 for node, cost in self.analysis.costs.items()}
        return compute_shares(replace(self.analysis, costs=costs), aside=self.added)

    @cached_property
    def hooked(self) -> tuple[fx.GraphModule, dict[str, Layer], dict[str, nn.Module]]:
        """The graph to hook and, by name of a node, its layers and the taps of queries and keys."""
        projections, readers = set[str](), set[str]()
        for site in self.analysis.sites:
            for span in site.listening:
                reader = self.by_node[span.reader]
                if reader.target in (LINEAR, CONV2D):
                    if can_be_observed(reader, self.by_node[span.name]):
                        readers.add(span.reader)
                elif site.kind == "queries and keys":
                    projections.add(span.name)
        return build_listening_graph(self.followed, readers, projections, dict(self._read(readers)))

    def _read(self, readers: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield linear layers after attentions, by name, and the mask of rows that later nodes read, if not all."""
        behind = {span.reader for site in self.analysis.sites if site.kind == "values" for span in site.listening}
        for name in sorted(behind & readers):
            node = self.by_node[name]
            if node.target is LINEAR and not any(each.is_meta for each in self.program.graph.parameters()):
                gone = unread_queries(self.program, node)
                if gone is not None:
                    yield name, ~gone

    @cached_property
    def uses(self) -> Mapping[str, list[str]]:
        """The names of the nodes that call each layer, by the name of its weight."""
        uses: dict[str, list[str]] = {}
        for called in layers(self.program, in_groups=True):
            uses.setdefault(called.weight, []).append(called.node.name)
        return uses

    @cached_property
    def by_node(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.program.nodes}
