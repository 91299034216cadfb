"""All options of a reduction, and the refusals of contradictory combinations. Imports no torch.

Messages name the options of the command `reduce`; recipes and the Python interface respell them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from corp_deploy.polish.options import SWEEPS, PolishName, PolishOptions
from corp_deploy.reduction.method import LOOPS, NOT_HELD_OUT, LoopName, Method, loop_from
from ground.errors import BadInput
from ground.quantity import SECONDS, STEPS

from .budget_choice import CLOSED_LOOP, BudgetChoice, cost
from .merging import MergingChoice
from .method_choice import COMPOSITIONS, MethodChoice, SparseChoice, with_implied
from .option import NEEDED, PathLike, Record, option
from .option_support import Axis
from .reduction_table import ATTENTION, IMAGES, LOOP, MERGING, POLISH, SPARSE, WIDTHS
from .values import DIRECTORY, FILE, OneOf

SaveAs = Literal["hf"]
Effort = Literal["quick", "standard", "thorough"]
"""Stages tried after one pass over the moments: none; the closed loop; also a budget's widths in it, and a polish."""


@dataclass(frozen=True, kw_only=True)
class RepairChoice(Record, heading="Loops, polish and results"):
    """The closed loop, the stages to try, the polish, held-out moments, the solver's device, and the saved format."""

    allow_partial: bool = option(default=False, help="Continue if some of the requested sites can't be reduced.")
    closed_loop: bool | Literal["asymmetric", "symmetric", "none"] | None = option(
        OneOf((*LOOPS, "none"), on="asymmetric", off="none"),
        flag_value="asymmetric",
        help="Fit block by block on the inputs that the model reduced so far gives: asymmetric (or no value), to the "
        f"dense model's stream, {cost(CLOSED_LOOP)}; symmetric, as published by GRAIL, to the outputs of the dense "
        "weights on these inputs.",
    )
    effort: Effort = option(
        default="quick",
        help="Stages to try; each is kept if it has the smaller error on held-out images: quick, one pass over the "
        "moments; standard, the closed loop too, which takes most of the time; thorough, also a budget's widths tried "
        "in the loop, and --polish layer if it applies.",
    )
    polish: PolishName | None = option(
        help="Then fit each reduced layer, without labels, by least squares on the calibration images to the dense "
        "model's stream. Judged on held-out images, on which the model never gets worse. Default: none.",
    )
    polish_steps: int | None = option(
        STEPS,
        help=f"Sweeps over each layer; default: {SWEEPS}. " + POLISH.help("polish_steps"),
    )
    polish_time: float | None = option(
        SECONDS,
        help="Seconds after which polishing ends; without --polish-steps it is the only limit. "
        + POLISH.help("polish_time"),
    )
    reads: Literal["all", "pooled"] | None = option(
        help="Tokens the last block is fitted to: all, or those the outputs read; default: all without a classifier. "
        + LOOP.help("reads"),
    )
    save_as: SaveAs | None = option(
        OneOf(get_args(SaveAs)),
        help="hf: for a model read by --model hf:DIR, also write OUTPUT/hf, a plain Hugging Face directory that "
        "AutoModel loads; needs one MLP width for all layers, and square heads if its class supports them.",
    )
    held_out: PathLike | None = option(
        FILE,
        in_recipe=False,
        help="Moments of other images (calibrate --hold-out), which judge every site.",
    )
    device: Literal["cpu", "cuda"] = option(default="cpu", in_recipe=False, help="Device for the solves.")


@dataclass(frozen=True)
class ReduceFiles(Record):
    """The moments file that `reduce` reads and the directory that it writes, positional parameters in Python."""

    moments: PathLike = option(FILE, NEEDED, help="Moments of this model, written by calibrate.")
    output: PathLike = option(DIRECTORY, NEEDED, help="Directory for model.safetensors and config.json.")


@dataclass(frozen=True, kw_only=True)
class ReduceOptions(SparseChoice, MergingChoice, RepairChoice, BudgetChoice, MethodChoice):
    """All options of `reduce`.

    Raises BadInput for options that change nothing in the model, that have no effect, or that contradict one another.
    """

    def __post_init__(self) -> None:
        Record.__post_init__(self)
        self.refuse_ignored(self.non_default)
        super().__post_init__()
        narrows = self.allocates or any(each is not None for each in self.sparsities)
        if not narrows and self.merge_tokens is None and not self.sparse:
            raise BadInput(
                "nothing asked for: give --mlp, --attn or --conv a share to remove (0 keeps widths), --whole-heads "
                "one, a budget: --macs 0.6, a limit: --within 'error 0.05', tokens to merge: --merge-tokens 12, or "
                "weights to set to zero: --sparse 2:4"
            )
        if self.merge_tokens is not None and self._fits_channels:
            raise BadInput(
                f"--merge-tokens: preset {self.preset} fits merged channels or heads with the same weight for every "
                "token, but merged tokens have different weights; give another preset"
            )
        self._refuse_beside_whole_heads()
        self._refuse_beside_budgets()
        self._refuse_beside_loop()
        self._refuse_beside_effort(narrows)

    def _refuse_beside_whole_heads(self) -> None:
        if self.whole_heads is not None and (self.allocates or self.auto_heads):
            what = "--heads auto" if self.auto_heads else f"--{self.widths}"
            raise BadInput(
                f"{what} chooses widths of all heads, and --whole-heads removes some; reduce by --whole-heads "
                "first, calibrate the result, and give it the budget"
            )

    def _refuse_beside_budgets(self) -> None:
        if self.merges == "mlp" and self.latency_tables is not None:
            raise BadInput(
                "--latency-tables has times of layers with all tokens, without what --merge-how mlp saves; give --macs"
            )
        if self.allocates and any(self.sparsities):
            raise BadInput(f"--{self.widths} chooses the widths itself; give it without --mlp, --attn and --conv")
        if self.within is None:
            return
        if self.sparse:
            raise BadInput("--within judges widths, and --sparse would follow unjudged; give one of both")
        if self.auto_heads:
            raise BadInput("--within tries budgets of one geometry; give --heads padded, square or ragged")

    def _refuse_beside_loop(self) -> None:
        if self.residual and self.loop is not None:
            raise BadInput(
                "--closed-loop fits to the dense model's stream, of which --residual removes channels; give one of both"
            )
        if self.held_out is not None and self.loop is not None:
            raise BadInput(f"--closed-loop: {NOT_HELD_OUT[self.loop]}; leave --held-out out")

    def _refuse_beside_effort(self, narrows: bool) -> None:
        if not self.composes:
            return
        for name, value in (("closed-loop", self.closed_loop), ("polish", self.polish)):
            if value is not None:
                raise BadInput(f"--{name}: --effort {self.effort} settles that by trying it; give one of both")
        if self.preset in COMPOSITIONS:
            raise BadInput(f"--effort {self.effort}: preset {self.preset} says what is composed; give one of both")
        if self.within is not None:
            raise BadInput(
                f"--effort {self.effort}: --within tries budgets in one way; give it --closed-loop or --polish"
            )
        if self.held_out is not None:
            raise BadInput(f"--effort {self.effort} sets images apart to judge by; leave --held-out out")
        if self.residual:
            raise BadInput(
                f"--effort {self.effort} tries the closed loop, which fits to the dense model's stream, of which "
                "--residual removes channels; give one of both"
            )
        if not narrows and self.merge_tokens is None:
            raise BadInput(
                f"--effort {self.effort}: nothing is repaired where weights alone are set to zero; leave it out"
            )

    @property
    def composes(self) -> bool:
        """True if `effort` is not quick: further stages are tried, and each is kept only if it lowers the error."""
        return self.effort != "quick"

    @property
    def _implied(self) -> dict[str, Any]:
        return with_implied({"preset": self.preset, "closed_loop": self.closed_loop, "polish": self.polish})

    @property
    def loop(self) -> LoopName | None:
        return loop_from(self._implied["closed_loop"])

    @property
    def polishing(self) -> PolishName:
        name: PolishName | None = "layer" if self.effort == "thorough" else self._implied["polish"]
        return name or "none"

    @property
    def polish_options(self) -> PolishOptions | None:
        """The largest number of sweeps and the time limit of the polish, None without a polish."""
        if self.polishing == "none":
            return None
        return PolishOptions(steps=self.polish_steps, time_s=self.polish_time)

    @property
    def method_asked(self) -> Method:
        """The method, with MLPs and attention repaired at full width if a closed loop follows token merging alone."""
        looped = self.loop is not None or self.composes
        repairs = self.merges in ("merge", "drop") and looped and not self.allocates
        if not repairs or any(each is not None for each in self.sparsities):
            return self.method
        return replace(self.method, mlp_sparsity=0.0, attention_sparsity=0.0)

    @property
    def auto_heads(self) -> bool:
        return self.heads == "auto"

    @property
    def _fits_channels(self) -> bool:
        """True if the method merges channels or heads, for which it needs images besides moments."""
        return self.method.merges or self.method.folds_heads

    @property
    def needs_images(self) -> bool:
        fitted = self.loop is not None or self.composes or self.polishing != "none" or self.rescale or bool(self.sparse)
        return self.allocates or self.auto_heads or fitted or self._fits_channels

    @property
    def touches_attention(self) -> bool:
        return self.attn is not None or self.allocates or self.auto_heads

    @property
    def ways(self) -> Iterator[tuple[Axis, str]]:
        yield self.of_preset
        yield WIDTHS, self.widths
        yield ATTENTION, "reduced" if self.touches_attention else "kept"
        yield LOOP, "asymmetric" if self.composes else self.loop or "open"
        yield POLISH, self.polishing
        yield MERGING, self.merges
        yield SPARSE, "sparse" if self.sparse else "none"
        yield IMAGES, "images" if self.needs_images else "none"

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        for axis, way in self.ways:
            axis.refuse([("", way)], options)
        self._refuse_idle_kinds(options)

    def _refuse_idle_kinds(self, options: Mapping[str, Any]) -> None:
        """Raise BadInput for a ranking or a repair that is given for a kind of site which is not reduced."""
        mlp, conv = self.mlp is not None or self.allocates, self.conv is not None or self.allocates
        touched = {
            "mlp": (mlp, "--mlp"),
            "conv": (conv, "--conv"),
            "channels": (mlp or conv, "--mlp or --conv"),
            "head": (self.touches_attention, "--attn"),
            "heads": (self.whole_heads is not None, "--whole-heads"),
        }
        for name in ("select", "repair"):
            for kind, how in (options.get(name) or {}).items():
                reduced, by = touched[kind]
                if not reduced:
                    spelled = how if kind == "channels" else f"{kind}={how}"
                    raise BadInput(
                        f"--{name} {spelled} has no effect on sites that are not reduced; give {by} a share to remove"
                    )
