"""[reduce] of a recipe as a type: what is asked of the reduction, and the same as `reduce` takes it. No torch."""

from typing import Any

from corp_deploy.invocation.call import Pairs
from corp_deploy.invocation.compositions import method_of, with_implied
from corp_deploy.invocation.honours import Axis
from corp_deploy.invocation.limit import limit_from_text
from corp_deploy.invocation.merging import AUTO, merging_from_options
from corp_deploy.invocation.method_choice import MethodChoice
from corp_deploy.invocation.reduction import BudgetChoice, PolishChoice, ReductionChoice
from corp_deploy.invocation.reduction_table import ATTENTION, LOOP, MERGING, POLISH, SPARSE, WIDTHS
from corp_deploy.invocation.sparsity import sparse_from_options
from corp_deploy.polish.options import PolishName
from corp_deploy.reduction.method import DEFAULT_RIDGE_REL, LoopName, Method, loop_from
from ground.errors import BadInput

from . import recipe_values
from .recipe_table import Table, refuse_ignored


class ReduceTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares to remove (`mlp`, `attn`, `conv`, `residual`), to keep of the whole model (`macs`, `params`,
    `latency` by the tables of a directory), or the most that may be lost (`within`), and how.
    """

    preset: recipe_values.Preset = "best"
    mlp: recipe_values.ShareRemoved | None = None
    attn: recipe_values.ShareRemoved | None = None
    conv: recipe_values.ShareRemoved | None = None
    residual: recipe_values.ShareRemoved | None = None
    whole_heads: recipe_values.ShareRemoved | None = None
    macs: recipe_values.ShareKept | None = None
    params: recipe_values.ShareKept | None = None
    latency: recipe_values.ShareKept | None = None
    latency_tables: recipe_values.Location | None = None
    batch: recipe_values.Batch | None = None
    within: recipe_values.Text | None = None
    select: recipe_values.SelectMlp | None = None
    select_mlp: recipe_values.SelectMlp | None = None
    select_head: recipe_values.SelectHead | None = None
    select_conv: recipe_values.SelectConv | None = None
    select_heads: recipe_values.SelectHeads | None = None
    repair: recipe_values.Repair | None = None
    repair_mlp: recipe_values.RepairMlp | None = None
    repair_conv: recipe_values.RepairConv | None = None
    repair_heads: recipe_values.RepairHeads | None = None
    qk: recipe_values.QueriesKeys | None = None
    heads: recipe_values.Heads = "padded"
    align_mlp: recipe_values.Multiple = 64
    align_head: recipe_values.Multiple = 16
    align_conv: recipe_values.Multiple = 32
    ridge: recipe_values.Ridge = DEFAULT_RIDGE_REL
    closed_loop: recipe_values.ClosedLoop | None = None
    rescale: recipe_values.Flag = False
    rotate: recipe_values.Flag | None = None
    polish: recipe_values.Polish | None = None
    polish_steps: recipe_values.Steps | None = None
    polish_time: recipe_values.Seconds | None = None
    allow_partial: recipe_values.Flag = False
    reads: recipe_values.Reads | None = None
    merge_tokens: recipe_values.MergeTokens | None = None
    merge_metric: recipe_values.MergeMetric | None = None
    merge_how: recipe_values.MergeHow | None = None
    merge_outputs: recipe_values.MergeOutputs | None = None
    sparse: recipe_values.Text | None = None
    sparse_pattern: recipe_values.SparsePattern | None = None
    sparse_permute: recipe_values.SparsePermute | None = None
    save_as: recipe_values.SaveAs | None = None

    def __post_init__(self) -> None:
        self._refuse_contradictions()
        asked = {
            "attn": self.attn,
            "conv": self.conv,
            "residual": self.residual,
            "whole_heads": self.whole_heads,
            "heads": None if self.heads == "padded" else self.heads,
            "reads": self.reads,
            "rescale": self.rescale or None,
            "rotate": self.rotate,
            "polish_steps": self.polish_steps,
            "polish_time": self.polish_time,
            "latency_tables": self.latency_tables,
            "batch": self.batch,
            "qk": self.qk,
        }
        try:
            ways = self.ways
        except BadInput as error:
            raise BadInput(f"[reduce]: {error}") from None
        for axis, way in ways:
            refuse_ignored("[reduce]", axis, way, asked | self.merging | self.sparsity)
        try:
            self.choice.refuse_idle_kinds({"select": self.rankings, "repair": self.repairs})
        except BadInput as error:
            raise BadInput(f"[reduce]: {error}") from None

    def _refuse_contradictions(self) -> None:
        every = {"macs": self.macs, "params": self.params, "latency": self.latency, "within": self.within}
        budgets = [name for name, value in every.items() if value is not None]
        if len(budgets) > 1:
            raise BadInput(f"[reduce] has {' and '.join(budgets)}; give one budget")
        if budgets and (self.mlp or self.attn or self.conv or self.residual or self.whole_heads):
            raise BadInput(
                f"[reduce] has a budget ({budgets[0]}) and sparsities (mlp, attn, conv, residual, whole_heads); give "
                "one of the two"
            )
        shares = (self.mlp, self.attn, self.conv, self.residual, self.whole_heads)
        asked = (*shares, self.merge_tokens, self.sparse)
        if not budgets and all(each is None for each in asked):
            raise BadInput(
                "[reduce] asks for nothing; give mlp, attn or conv a share to remove (0 keeps the widths), "
                "whole_heads one, a budget, merge_tokens, or sparse"
            )
        if budgets and method_of(self.preset) != "best":
            raise BadInput(f"reduce.{budgets[0]} needs preset best, got {self.preset!r}")
        if self.latency is not None and self.latency_tables is None:
            raise BadInput(
                "reduce.latency needs reduce.latency_tables, a folder where the measured tables are kept, such as "
                "'latency-tables'"
            )

    @property
    def has_budget(self) -> bool:
        return any(each is not None for each in (self.macs, self.params, self.latency, self.within))

    @property
    def touches_attention(self) -> bool:
        return self.has_budget or self.attn is not None or self.heads == "auto"

    @property
    def _implied(self) -> dict[str, Any]:
        """The keys that a preset may imply, with what it does."""
        return with_implied({"preset": self.preset, "closed_loop": self.closed_loop, "polish": self.polish})

    @property
    def loop(self) -> LoopName | None:
        return loop_from(self._implied["closed_loop"])

    @property
    def said_loop(self) -> str | bool | None:
        """As `reduce` is told of it: `none` where the preset would imply one."""
        implied = with_implied({"preset": self.preset}).get("closed_loop")
        return "none" if self.closed_loop is False and implied else self.closed_loop

    @property
    def polishing(self) -> PolishName:
        name: PolishName | None = self._implied["polish"]
        return name or "none"

    @property
    def ways(self) -> tuple[tuple[Axis, str], ...]:
        """What is at work in `reduce` and may not honour an option."""
        touched = "reduced" if self.touches_attention else "kept"
        widths = (WIDTHS, "latency" if self.latency is not None else "within" if self.within else "sparsities")
        tokens = "none" if self.merge_tokens is None else self.merge_how or "merge"
        zeros = "none" if self.sparse is None else "sparse"
        on_streams = (LOOP, self.loop or "open"), (POLISH, self.polishing)
        knobs = MethodChoice(preset=self.preset, select=self.rankings, repair=self.repairs, qk=self.qk)
        return (
            knobs.of_preset,
            widths,
            (ATTENTION, touched),
            *on_streams,
            (MERGING, tokens),
            (SPARSE, zeros),
        )

    @property
    def merging(self) -> dict[str, str]:
        """The options of token merging that are set, as the command takes them."""
        values = {
            "merge_tokens": None if self.merge_tokens is None else str(self.merge_tokens),
            "merge_metric": self.merge_metric,
            "merge_how": self.merge_how,
            "merge_outputs": self.merge_outputs,
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def sparsity(self) -> dict[str, str]:
        """The options of sparse weights that are set, as the command takes them."""
        values = {
            "sparse": self.sparse,
            "sparse_pattern": self.sparse_pattern,
            "sparse_permute": self.sparse_permute,
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def merging_of_statistics(self) -> dict[str, str]:
        """Those under which moments are taken: none where a budget will choose the schedule."""
        if self.merge_tokens == AUTO:
            return {}
        return {name: value for name, value in self.merging.items() if name != "merge_outputs"}

    @property
    def rankings(self) -> Pairs:
        """What sites are ranked by otherwise than the preset does, as the command takes it."""
        return Pairs.some(
            channels=self.select,
            mlp=self.select_mlp,
            head=self.select_head,
            conv=self.select_conv,
            heads=self.select_heads,
        )

    @property
    def repairs(self) -> Pairs:
        """What they are repaired by, likewise."""
        return Pairs.some(channels=self.repair, mlp=self.repair_mlp, conv=self.repair_conv, heads=self.repair_heads)

    @property
    def _method_choice(self) -> MethodChoice:
        return MethodChoice(
            preset=self.preset,
            mlp=self.mlp,
            attn=self.attn,
            conv=self.conv,
            residual=self.residual,
            whole_heads=self.whole_heads,
            select=self.rankings,
            repair=self.repairs,
            qk=self.qk,
            heads=self.heads,
            align={"mlp": self.align_mlp, "head": self.align_head, "conv": self.align_conv},
            ridge=self.ridge,
            rescale=self.rescale,
            rotate=self.rotate,
        )

    @property
    def choice(self) -> ReductionChoice:
        """The same as `reduce` takes it."""
        return ReductionChoice(
            method=self._method_choice,
            budget=BudgetChoice(
                macs=self.macs,
                params=self.params,
                latency=self.latency,
                latency_tables=self.latency_tables,
                batch=self.batch,
            ),
            within=None if self.within is None else limit_from_text(self.within),
            closed_loop=self.loop,
            polish=PolishChoice(polish=self.polishing, polish_steps=self.polish_steps, polish_time=self.polish_time),
            reads=self.reads,
            allow_partial=self.allow_partial,
            merging=merging_from_options(self.merging),
            sparsity=sparse_from_options(self.sparsity),
            save_as=self.save_as,
        )

    @property
    def looks_at_images(self) -> bool:
        """Whether the reduction looks at the calibration images beside their moments."""
        return self.choice.needs_images

    @property
    def method(self) -> Method:
        """How sites are reduced; heads = auto starts from padded ones."""
        return self.choice.method_asked
