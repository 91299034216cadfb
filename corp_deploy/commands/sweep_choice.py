"""The options of `sweep`: the reductions to try, and how they are judged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from corp_deploy.invocation.budget_choice import MOST_CUT
from corp_deploy.invocation.input_choice import InputOptions
from corp_deploy.invocation.method_choice import GeometryOptions, MethodChoice
from corp_deploy.invocation.option import Pairs, Record, option
from corp_deploy.invocation.option_support import words_of
from corp_deploy.invocation.reduction_table import ATTENTION, FITTED, PRESET
from corp_deploy.invocation.values import FILE, PLACE, ListOf, OneOf
from corp_deploy.reduction.method import CHANNEL_REPAIRS, MLP_RANKINGS, PRESETS, QK_RECOVERIES
from ground.errors import BadInput
from ground.places import Place
from ground.quantity import BATCH, JOBS, SHARE, SHARE_KEPT, SHARE_REMOVED

if TYPE_CHECKING:
    from torch import nn

    from corp_deploy.planning.sweep_points import SweepPoint
    from corp_deploy.planning.sweep_trials import SweepRequest

Knobs = Mapping[str, str]
KNOBS = ("select", "repair", "qk")
NO_KNOBS: Knobs = MappingProxyType({})
KINDS = {"mlp": "channels", "attn": "heads", "conv": "convolutions"}
"""The kinds of sites by the words of --parts."""


def _choice(preset: str, knobs: Knobs) -> MethodChoice:
    select, repair = ({"channels": knobs[name]} if name in knobs else None for name in ("select", "repair"))
    return MethodChoice(preset=preset, select=select, repair=repair, qk=knobs.get("qk"))


def _several(words: Sequence[str], default: tuple[str, ...] = (), *, help: str) -> Any:
    return option(ListOf(OneOf(tuple(words)), ",".join([*words][:2])), default, help=help)


@dataclass(frozen=True, kw_only=True)
class SweepChoice(GeometryOptions, heading="Trials"):
    """The trials of a sweep: every preset with every knob at every sparsity, and preset best at every budget.

    A knob is a value of `select`, `repair` or `qk` in place of the preset's own. Sparsities apply to `parts`; `there`
    are the parts that the model has. Raises BadInput for a preset that needs calibration inputs without any.
    """

    calibration_images: Place | None = option(
        PLACE, help="The calibration images, for presets grail-fold and fold and for budgets."
    )
    calibration_text: Path | None = option(FILE, help="The same for a text encoder.")
    sparsity: Sequence[float] = option(ListOf(SHARE_REMOVED, "0.3,0.5"), (0.3, 0.5, 0.7), help="Sparsities to try.")
    macs: Sequence[float] = option(
        ListOf(SHARE_KEPT, "0.6,0.8"),
        (),
        help="Budgets to try too: shares of the dense MACs to keep, with preset best.",
    )
    most_cut: float = option(SHARE, MOST_CUT, help="As reduce --most-cut, for every budget.")
    parts: Literal["joint", "mlp", "attn", "conv"] = option(
        default="joint", help="Sites that the sparsities apply to: all (joint), or one kind."
    )
    preset: Sequence[str] = _several(tuple(PRESETS), ("best", "none"), help="Presets to try.")
    select: Sequence[str] = _several(
        MLP_RANKINGS,
        help="Rankings of channels to try with every preset, as reduce --select; default: the preset's own.",
    )
    repair: Sequence[str] = _several(
        CHANNEL_REPAIRS,
        help="Repairs of channels to try with every preset, as reduce --repair; default: the preset's own.",
    )
    qk: Sequence[str] = _several(
        QK_RECOVERIES,
        help="Reductions of queries and keys, as reduce --qk, to try with every preset; default: the preset's own.",
    )
    there: tuple[str, ...] = ("mlp", "attn")

    def __post_init__(self) -> None:
        super().__post_init__()
        merging = [name for name in self.preset if PRESETS[name].merges]
        if merging and self.calibration.path is None:
            raise BadInput(
                f"preset {merging[0]} is fitted to the calibration images; give --calibration-images, or "
                "--calibration-text for a text encoder"
            )

    @property
    def calibration(self) -> InputOptions:
        """The inputs that presets with merged channels are fitted to, and that the allocation of budgets uses."""
        return InputOptions(images=self.calibration_images, text=self.calibration_text)

    @property
    def knobs(self) -> Sequence[Knobs]:
        """All combinations of the given knobs; without knobs, one empty combination."""
        every = {name: hows for name in KNOBS if (hows := self.values[name])}
        return [dict(zip(every, hows, strict=True)) for hows in product(*every.values())]

    @property
    def _ways(self) -> list[tuple[str, Knobs]]:
        return [(preset, knobs) for preset in self.preset for knobs in self.knobs]

    def _touches(self, part: str, preset: str, knobs: Knobs) -> bool:
        """Return True if the sweep applies sparsities to a kind of sites (`part`) and the preset reduces that kind."""
        axis, way = _choice(preset, knobs).of_preset
        return self._tries(part) and axis.variants[way].supports(part, True)

    def _tries(self, part: str) -> bool:
        """Return True if the sweep applies sparsities to a kind of sites (`part`) and the model has such sites."""
        return self.parts in ("joint", part) and part in self.there

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        """Raise BadInput for one of these options that has no effect with any preset of the sweep."""
        names = ("parts", "heads", "qk", *(() if self.macs else FITTED))  # a budget is allocated by the fitted inputs
        about = {name: value for name, value in options.items() if name in names}
        ways = [_choice(*each).of_preset for each in self._ways]
        axis = replace(PRESET, variants={name: way for each, _ in ways for name, way in each.variants.items()})
        axis.refuse([("", name) for _, name in ways], about)
        touching = any(self._touches("attn", *each) for each in self._ways) or bool(self.macs)
        if self.parts == "attn" and (self.select or self.repair):
            option = "--select" if self.select else "--repair"
            raise BadInput(f"{option} selects channels, which --parts attn doesn't reduce; leave out one of the two")
        ATTENTION.refuse([("", "reduced" if touching else "kept")], about)

    def _request(
        self, preset: str, knobs: Knobs, share: float | None, budget: float | None = None, moments: int = 0
    ) -> "SweepRequest":
        from corp_deploy.planning.sweep_trials import SweepRequest

        choice = replace(
            _choice(preset, knobs),
            mlp=share if self._tries("mlp") else None,
            attn=share if self._touches("attn", preset, knobs) else None,
            conv=share if self._touches("conv", preset, knobs) else None,
            heads=self.heads,
            align=self.align,
        )
        return SweepRequest(preset=preset, method=choice.method, budget=budget, knobs=dict(knobs), moments=moments)

    def of_model(self, model: "nn.Module") -> "SweepChoice":
        """Return the options with `there` set to the model's parts; raise BadInput for options on other parts."""
        from corp_deploy.families.family import kinds_of, refuse_idle_options

        for part, kind in KINDS.items():
            refuse_idle_options(model, kind, {"--parts": self.parts if self.parts == part else None})
        refuse_idle_options(model, "heads", {"--heads": None if self.heads == "padded" else self.heads})
        there = tuple(part for part, kind in KINDS.items() if kind in kinds_of(model))
        return replace(self, there=there)

    def refuse_far(self, model: "nn.Module") -> None:
        """Raise BadInput if an even cut meets a budget only by taking more than `most_cut` of every site."""
        from corp_deploy.planning.first_plan import refuse_far_cuts

        for share in self.macs:
            refuse_far_cuts(model, self._request("best", NO_KNOBS, None).method, "macs", share, self.most_cut)

    def requests(self, moments: int = 1) -> "list[SweepRequest]":
        """Return all trials for each of `moments` moments files, in the order in which they are tried and shown."""
        return [
            request
            for place in range(moments)
            for request in (
                *(self._request(*each, share, moments=place) for each in self._ways for share in self.sparsity),
                *(self._request("best", NO_KNOBS, None, budget, moments=place) for budget in self.macs),
            )
        ]

    def words_of(self, point: "SweepPoint", inputs: InputOptions, options: dict[str, Any]) -> str:
        """Return the options of `reduce` that repeat the trial of a point; `options` are those that the user typed."""
        touches = point.budget is not None or self._touches("attn", point.preset, point.knobs)
        chosen: dict[str, Any] = {"preset": point.preset, **point.knobs}
        if point.budget is not None:
            chosen |= {"macs": point.budget, "most_cut": None if self.most_cut == MOST_CUT else self.most_cut}
        else:
            convolutions = self._touches("conv", point.preset, point.knobs)
            chosen |= {
                "mlp": point.mlp_sparsity if self._tries("mlp") else None,
                "attn": point.attention_sparsity if touches else None,
                "conv": point.conv_sparsity if convolutions else None,
                "allow_partial": bool(point.sites_refused),
            }
        typed = {"heads": self.heads if touches else None, "align": Pairs(self.align)}
        chosen |= {name: value for name, value in typed.items() if name in options}
        return " ".join([*words_of(chosen), *self._words_of_inputs(point, inputs)])

    def _words_of_inputs(self, point: "SweepPoint", inputs: InputOptions) -> Sequence[str]:
        """Return the options of `reduce` for the inputs that the trial of a point reads, if any.

        A budget reads the calibration inputs or, without any, the inputs that score the sweep; merged channels are
        fitted to the calibration inputs.
        """
        if self.calibration.path is not None:
            return [self.calibration.describe] * (point.budget is not None or PRESETS[point.preset].merges)
        if point.budget is None:
            return []
        drawn = [] if inputs.samples is None else [f"--samples {inputs.samples}", f"--seed {inputs.seed}"]
        return [inputs.describe, *drawn]


@dataclass(frozen=True, kw_only=True)
class TrialsChoice(Record, heading="Trials"):
    """The options of how trials are carried out and judged."""

    held_out: Path | None = option(
        FILE,
        help="Moments of other images (calibrate --hold-out): with several --moments they judge every site at each "
        "number of images.",
    )
    min_agreement: float | None = option(
        SHARE, help="Name the smallest model with this agreement, and the fastest if trials are timed."
    )
    jobs: int = option(
        JOBS,
        1,
        help="Processes of this machine that reduce and judge a trial at a time; timing runs alone, afterwards.",
    )
    keep_models: bool = option(default=False, help="Keep every trial's reduced model, in OUTPUT/trials.")
    batch_size: int = option(BATCH, 32, help="Images in one forward pass.")
