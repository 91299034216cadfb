"""The tables of a recipe as types: keys, defaults, and the rules over keys of one table, which its constructor holds.

Imports no torch.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from corp_deploy.families.outputs import Outputs
from corp_deploy.families.preprocessing import Preprocessing
from corp_deploy.families.trusted_code import file_and_function, is_code
from corp_deploy.invocation.compositions import method_of, with_implied
from corp_deploy.invocation.honours import Axis
from corp_deploy.invocation.limit import limit_from_text
from corp_deploy.invocation.merging import AUTO, merging_from_options
from corp_deploy.invocation.reduction import BudgetChoice, MethodChoice, PolishChoice, ReductionChoice
from corp_deploy.invocation.sparsity import sparse_from_options
from corp_deploy.invocation.table import ATTENTION, LOOP, MERGING, POLISH, PRESET, SPARSE
from corp_deploy.polish.options import PolishName
from corp_deploy.reduction.method import DEFAULT_RIDGE_REL, LoopName, Method, loop_from
from corp_deploy.store.hub_snapshot import PREFIX
from ground.errors import BadInput

from . import recipe_values
from .recipe_table import Table, refuse_ignored


class ReleaseTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: recipe_values.Text


class ModelTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model` is a directory as an absolute path, behind hf: where transformers wrote it, a timm name, which goes
    with `weights`, or module:PATH.py:FUNCTION with the absolute path of a user's code.
    """

    model: recipe_values.Text
    weights: recipe_values.Location | None = None
    kwargs: recipe_values.Arguments = msgspec.field(default_factory=dict)
    ema: recipe_values.Flag | None = None
    mean: recipe_values.Means | None = None
    std: recipe_values.Deviations | None = None
    crop_pct: recipe_values.ShareKept | None = None
    interpolation: recipe_values.Interpolation | None = None
    crop_mode: recipe_values.CropMode | None = None
    outputs: recipe_values.OutputNames | None = None

    def __post_init__(self) -> None:
        try:
            json.dumps(self.kwargs)
        except TypeError:
            raise BadInput(f"model.kwargs is {self.kwargs!r:.200}, expected no dates and times in it") from None
        try:
            _ = self.named_outputs
        except BadInput as error:
            raise BadInput(f"model.{error}") from None

    @property
    def named_outputs(self) -> Outputs | None:
        """What the model gives by name, None for its own output."""
        return None if self.outputs is None else Outputs(self.outputs)

    @property
    def code(self) -> Path | None:
        """The file of a user's code that makes the model; a recipe alone never has it run."""
        return file_and_function(self.model)[0] if is_code(self.model) else None

    @property
    def trust(self) -> dict[str, Any]:
        """What every command that makes the model is told of it."""
        return {} if self.code is None else {"trust_code": True}

    @property
    def directory(self) -> Path | None:
        path = Path(self.model.removeprefix(PREFIX))
        return path if path.is_absolute() else None

    @property
    def prefix(self) -> str:
        """What stands before the directory of another library's model."""
        return PREFIX if self.model.startswith(PREFIX) else ""

    @property
    def preprocessing(self) -> Preprocessing:
        """What of the preprocessing is set."""
        return Preprocessing(
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            crop_mode=self.crop_mode,
        )


class CalibrationTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    images: recipe_values.Location
    samples: recipe_values.Images | None = None
    seed: recipe_values.Seed = 0
    batch_size: recipe_values.Batch = 32
    device: recipe_values.Device = "cpu"
    workers: recipe_values.Workers = 0
    max_bad: recipe_values.BadImages = 0
    hold_out: recipe_values.Images | None = None
    groups: recipe_values.Groups | None = None
    group_labels: recipe_values.Location | None = None
    attention_system: recipe_values.AttentionSystem | None = None


class HeldOutTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    images: recipe_values.Location
    labels: recipe_values.Location | None = None
    samples: recipe_values.Images | None = None
    seed: recipe_values.Seed = 0


class ReduceTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares to remove (`mlp`, `attn`, `conv`, `residual`), to keep of the whole model (`macs`, `params`), or the most
    that may be lost (`within`), and how.
    """

    preset: recipe_values.Preset = "best"
    mlp: recipe_values.ShareRemoved | None = None
    attn: recipe_values.ShareRemoved | None = None
    conv: recipe_values.ShareRemoved | None = None
    residual: recipe_values.ShareRemoved | None = None
    whole_heads: recipe_values.ShareRemoved | None = None
    macs: recipe_values.ShareKept | None = None
    params: recipe_values.ShareKept | None = None
    within: recipe_values.Text | None = None
    select_mlp: recipe_values.SelectMlp | None = None
    select_head: recipe_values.SelectHead | None = None
    select_conv: recipe_values.SelectConv | None = None
    select_heads: recipe_values.SelectHeads | None = None
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
        }
        for axis, way in self.ways:
            refuse_ignored("[reduce]", axis, way, asked | self.merging | self.sparsity)
        try:
            _ = self.choice
        except BadInput as error:
            raise BadInput(f"[reduce]: {error}") from None

    def _refuse_contradictions(self) -> None:
        every = {"macs": self.macs, "params": self.params, "within": self.within}
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

    @property
    def has_budget(self) -> bool:
        return self.macs is not None or self.params is not None or self.within is not None

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
        by_preset = (PRESET, method_of(self.preset))
        tokens = "none" if self.merge_tokens is None else self.merge_how or "merge"
        zeros = "none" if self.sparse is None else "sparse"
        on_streams = (LOOP, self.loop or "open"), (POLISH, self.polishing)
        return by_preset, (ATTENTION, touched), *on_streams, (MERGING, tokens), (SPARSE, zeros)

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
    def choice(self) -> ReductionChoice:
        """The same as `reduce` takes it."""
        select = {
            "mlp": self.select_mlp,
            "head": self.select_head,
            "conv": self.select_conv,
            "heads": self.select_heads,
        }
        return ReductionChoice(
            method=MethodChoice(
                preset=self.preset,
                mlp=self.mlp,
                attn=self.attn,
                conv=self.conv,
                residual=self.residual,
                whole_heads=self.whole_heads,
                select={site: ranking for site, ranking in select.items() if ranking is not None},
                heads=self.heads,
                align={"mlp": self.align_mlp, "head": self.align_head, "conv": self.align_conv},
                ridge=self.ridge,
                rescale=self.rescale,
                rotate=self.rotate,
            ),
            budget=BudgetChoice(macs=self.macs, params=self.params),
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


class BenchTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    batches: recipe_values.Batches = (1, 8, 32)
    time_limit_s: recipe_values.Seconds = 20.0
    half_width: recipe_values.ShareKept = 0.01
    block_ms: recipe_values.Milliseconds = 25.0
    min_rounds: recipe_values.Rounds = 16
    threads: recipe_values.Threads | None = None


class GateTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fail_if: recipe_values.Texts = ()


class SamplesTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: recipe_values.Images = 16


class PackageTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: recipe_values.ServedName | None = None
    labels: recipe_values.Location | None = None


class TargetTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of [targets], which may leave out what follows from the other tables."""

    precision: recipe_values.Precision | None = None
    batch: recipe_values.Text | None = None
    sms: recipe_values.Texts = ()
    sparse: recipe_values.Flag = False
    fail_if: recipe_values.Texts = ()
