"""A reduction as a command, a recipe or a demo asks for it: values that refuse what contradicts itself. No torch.

Fields have the names of the options of `reduce`, and a refusal spells them so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from corp_deploy.polish.options import PolishName, PolishOptions
from corp_deploy.reduction.method import NOT_HELD_OUT, LoopName, Method, loop_from
from ground.errors import BadInput

from .compositions import with_implied
from .limit import Limit, limit_from_text
from .merging import MergingChoice, merging_from_options
from .method_choice import MethodChoice
from .reduction_table import ATTENTION, IMAGES, LOOP, POLISH, WIDTHS
from .sparsity import SparseChoice, sparse_from_options

if TYPE_CHECKING:
    from corp_deploy.reduction.read_tokens import Reads

Currency = Literal["macs", "params", "latency"]
SaveAs = Literal["hf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChoice:
    """A share of the dense cost to keep, in (0, 1], in one currency or in none; tables and batch are of latency's.

    Raises BadInput for several budgets, and for one of latency without a place for its tables.
    """

    macs: float | None = None
    params: float | None = None
    latency: float | None = None
    latency_tables: Path | None = None
    batch: int | None = None

    def __post_init__(self) -> None:
        if len(self._shares) > 1:
            raise BadInput(f"--{' and --'.join(self._shares)} are several budgets; give one")
        if self.latency is not None and self.latency_tables is None:
            raise BadInput("--latency needs --latency-tables DIR, where the measured tables are kept")

    @property
    def _shares(self) -> dict[Currency, float]:
        every: dict[Currency, float | None] = {"macs": self.macs, "params": self.params, "latency": self.latency}
        return {currency: share for currency, share in every.items() if share is not None}

    @property
    def currency(self) -> Currency | None:
        return next(iter(self._shares), None)

    @property
    def share(self) -> float | None:
        return next(iter(self._shares.values()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishChoice:
    """What of the reduced model is fitted once more, for how many steps (of each layer or block, or of the model) and
    how many seconds at most; None is the default of `polish`.

    Raises BadInput for steps or time of no polish.
    """

    polish: PolishName = "none"
    polish_steps: int | None = None
    polish_time: float | None = None

    def __post_init__(self) -> None:
        _ = self.options(seed=0)

    def options(self, *, seed: int) -> PolishOptions | None:
        """As the polish takes them, its inputs drawn by the seed; None where there is none."""
        asked = PolishOptions(how=self.polish, steps=self.polish_steps, time_s=self.polish_time, seed=seed)
        return None if self.polish == "none" else asked


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionChoice:
    """A whole reduction: method, what settles the widths, on which streams blocks are repaired, what judges the sites,
    what is polished.

    `within` settles the widths by what they may lose; images `judge` that, or else those that calibration left out, and
    accuracy by their `labels`. `sparsity`: which weights become zero. `save_as`: what the model is written as beside
    its own directory. Raises BadInput where nothing is asked for, where a budget or a limit meets sparsities or one
    another, and for held-out moments with a closed loop.
    """

    method: MethodChoice
    budget: BudgetChoice = field(default_factory=BudgetChoice)
    closed_loop: LoopName | None = None
    polish: PolishChoice = field(default_factory=PolishChoice)
    reads: "Reads | None" = None
    held_out: Path | None = None
    allow_partial: bool = False
    within: Limit | None = None
    judge: Path | None = None
    labels: Path | None = None
    merging: MergingChoice = field(default_factory=MergingChoice)
    sparsity: SparseChoice = field(default_factory=SparseChoice)
    save_as: SaveAs | None = None

    def __post_init__(self) -> None:
        sparsities = self.method.sparsities
        narrows = self.allocates or any(each is not None for each in sparsities)
        if not narrows and not self.merging.asked and not self.sparsity.asked:
            raise BadInput(
                "nothing asked for: give --mlp, --attn or --conv a share to remove (0 keeps widths), --whole-heads "
                "one, a budget: --macs 0.6, a limit: --within 'error 0.05', tokens to merge: --merge-tokens 12, or "
                "weights to set to zero: --sparse 2:4"
            )
        if self.merging.asked and (self.method.method.merges or self.method.method.folds_heads):
            raise BadInput(
                f"--merge-tokens: preset {self.method.preset} merges channels or heads by tokens that all count alike, "
                "which merged ones don't; give another preset"
            )
        self._refuse_beside_whole_heads()
        self._refuse_beside_within()
        if self.budget.currency is not None and any(sparsities):
            raise BadInput("a budget chooses the widths itself; give it without --mlp, --attn and --conv")
        if self.method.residual and self.closed_loop is not None:
            raise BadInput(
                "--closed-loop fits to the dense model's stream, of which --residual removes channels; give one of both"
            )
        if self.held_out is not None and self.closed_loop is not None:
            raise BadInput(f"--closed-loop: {NOT_HELD_OUT[self.closed_loop]}; leave --held-out away")

    def _refuse_beside_whole_heads(self) -> None:
        if self.method.whole_heads is None:
            if (self.method.select or {}).get("heads"):
                raise BadInput("--select heads= ranks whole heads; give --whole-heads a share to remove")
            return
        if self.allocates or self.auto_heads:
            what = "--heads auto" if self.auto_heads else "--within" if self.within else f"--{self.budget.currency}"
            raise BadInput(
                f"{what} weighs widths of all heads, and --whole-heads takes some away; reduce by --whole-heads first, "
                "calibrate the result, and give it the budget"
            )

    def _refuse_beside_within(self) -> None:
        if self.within is None:
            return
        if self.budget.currency is not None:
            raise BadInput(f"--within chooses the budget itself; give it without --{self.budget.currency}")
        if any(self.method.sparsities):
            raise BadInput("--within chooses the widths itself; give it without --mlp, --attn and --conv")
        if self.sparsity.asked:
            raise BadInput("--within judges widths, and --sparse would follow unjudged; give one of both")
        if self.auto_heads:
            raise BadInput("--within tries budgets of one geometry; give --heads padded, square or ragged")
        if self.labels is not None and self.within.measure != "accuracy":
            raise BadInput(f"--labels say nothing of '{self.within}'; they are for --within 'accuracy -0.5'")

    @property
    def allocates(self) -> bool:
        """Whether widths are allocated by site: to a budget, or to what may be lost."""
        return self.budget.currency is not None or self.within is not None

    @property
    def widths(self) -> str:
        """What settles the widths, by the names of WIDTHS."""
        return "within" if self.within is not None else self.budget.currency or "sparsities"

    @property
    def method_asked(self) -> Method:
        """The method; where tokens alone are merged, a closed loop repairs every site at its full width."""
        method = self.method.method
        repairs = self.merging.asked and self.closed_loop is not None and not self.allocates
        if not repairs or any(each is not None for each in self.method.sparsities):
            return method
        return replace(method, mlp_sparsity=0.0, attention_sparsity=0.0)

    @property
    def auto_heads(self) -> bool:
        return self.method.heads == "auto"

    @property
    def needs_images(self) -> bool:
        """Whether the reduction looks at images beside their moments."""
        planned = self.allocates or self.auto_heads
        fitted = self.closed_loop is not None or self.polish.polish != "none"
        merged = self.method.method.merges or self.method.method.folds_heads
        return planned or fitted or merged or self.method.rescale or self.sparsity.asked

    @property
    def touches_attention(self) -> bool:
        return self.method.attn is not None or self.allocates or self.auto_heads

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        """Raise BadInput for one of these options, asked for by name, that nothing of this reduction honours."""
        axis, way = self.method.of_preset
        axis.refuse([("", way)], options)
        self.refuse_idle_kinds(options)
        WIDTHS.refuse([("", self.widths)], options)
        ATTENTION.refuse([("", "reduced" if self.touches_attention else "kept")], options)
        LOOP.refuse([("", self.closed_loop or "open")], options)
        POLISH.refuse([("", self.polish.polish)], options)
        IMAGES.refuse([("", "images" if self.needs_images else "none")], options)
        self.merging.refuse_ignored(options)
        self.sparsity.refuse_ignored(options)

    def refuse_idle_kinds(self, options: Mapping[str, Any]) -> None:
        """Raise BadInput for a ranking or a repair, asked for by name, of what this reduction leaves alone."""
        mlp, conv = self.method.mlp is not None or self.allocates, self.method.conv is not None or self.allocates
        touched = {
            "mlp": (mlp, "--mlp"),
            "conv": (conv, "--conv"),
            "channels": (mlp or conv, "--mlp or --conv"),
            "head": (self.touches_attention, "--attn"),
            "heads": (self.method.whole_heads is not None, "--whole-heads"),
        }
        for option in ("select", "repair"):
            for kind, how in (options.get(option) or {}).items():
                reduced, by = touched[kind]
                if not reduced:
                    spelled = how if kind == "channels" else f"{kind}={how}"
                    raise BadInput(f"--{option} {spelled} is of what stays as it is; give {by} a share to remove")


def _of(fields: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in fields if name in options}


def reduction_from_options(options: Mapping[str, Any]) -> ReductionChoice:
    """The reduction that these values of the options of `reduce` ask for; those left out, or None, have their defaults,
    which a preset may imply.
    """
    options = with_implied(options)
    polish = {name: options.get(name) for name in PolishChoice.__dataclass_fields__}
    within = options.get("within")
    return ReductionChoice(
        within=limit_from_text(within) if isinstance(within, str) else within,
        budget=BudgetChoice(**_of(BudgetChoice.__dataclass_fields__, options)),
        method=MethodChoice(**_of(MethodChoice.__dataclass_fields__, options)),
        closed_loop=loop_from(options.get("closed_loop")),
        polish=PolishChoice(**{name: value for name, value in polish.items() if value is not None}),
        merging=merging_from_options(options),
        sparsity=sparse_from_options(options),
        **_of(dict.fromkeys(("reads", "held_out", "allow_partial", "judge", "labels", "save_as")), options),
    )
