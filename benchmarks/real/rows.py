"""What is measured: every method as the words that `reduce` is given, at every share of the MACs.

`{joint}` stands for the uniform sparsity of MLPs and Q/K together that leaves at most the share of the dense MACs,
`{mlp}` for that of MLPs alone, where a preset reduces nothing else; `{each}` and `{grow}` for the fewest merged tokens
that do so, as many in each block or growing over the blocks; `{share}` for the share itself. For `calibrate`,
`{groups}` stands for the file that says of which photograph each crop is.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Literal

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import macs, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.merging import MergingChoice
from corp_deploy.planning.request import merging_from_choice
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import uniform_widths
from ground.errors import BadInput

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
OF_WIDTHS = (0.9, 0.8, 0.7, 0.66, 0.6, 0.5)  # two thirds of the MACs too: half of everything, widths alone
UNIFORM = "--mlp {joint} --attn {joint}"
BY_SITE = "--preset best --macs {share}"
LOOP = "--closed-loop asymmetric"
GROUPED = "--groups {groups}"
MERGING = "--preset best --merge-tokens"
OVERFITTING_SHARE = 0.8
MOST_MERGED = 256
PHOTOGRAPHS = (5, 10, 20, 37)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A line of the table: the words for `reduce`, those for `calibrate`, and whether `reduce` looks at images."""

    name: str
    reduce: str
    calibrate: str = ""
    images: bool = False
    shares: tuple[float, ...] = SHARES


METHODS = (
    Method(name="none", reduce=f"--preset none {UNIFORM}"),
    Method(name="vbp, MLPs alone", reduce="--preset vbp --mlp {mlp}"),
    Method(name="grail, MLPs alone", reduce="--preset grail --mlp {mlp}"),
    Method(name="corp-v1", reduce=f"--preset corp-v1 {UNIFORM}"),
    Method(name="corp", reduce=f"--preset corp {UNIFORM}", calibrate="--attention-system"),
    Method(name="best", reduce=f"--preset best {UNIFORM}"),
    Method(name="best, closed loop", reduce=f"--preset best {UNIFORM} {LOOP}", images=True),
    Method(name="best, by site", reduce=BY_SITE, images=True),
    Method(name="best, by site, closed loop", reduce=f"{BY_SITE} {LOOP}", images=True),
    Method(name="best, grouped", reduce=f"--preset best {UNIFORM}", calibrate=GROUPED),
    Method(name="best, by site, grouped", reduce=BY_SITE, calibrate=GROUPED, images=True),
    Method(
        name="best, by site, grouped, closed loop",
        reduce=f"{BY_SITE} {LOOP}",
        calibrate=GROUPED,
        images=True,
        shares=OF_WIDTHS,
    ),
    Method(name="merging", reduce=f"{MERGING} {{each}}"),
    Method(name="merging, growing", reduce=f"{MERGING} {{grow}}"),
    Method(name="merging, by cosines", reduce=f"{MERGING} {{each}} --merge-metric stream"),
    Method(name="merging, growing, by cosines", reduce=f"{MERGING} {{grow}} --merge-metric stream"),
    Method(name="merging, growing, closed loop", reduce=f"{MERGING} {{grow}} {LOOP}", images=True),
    Method(name="dropping", reduce=f"{MERGING} {{each}} --merge-how drop"),
    Method(
        name="merging and widths",
        reduce=f"{MERGING} auto --macs {{share}}",
        calibrate=GROUPED,
        images=True,
    ),
    Method(
        name="merging and widths, closed loop",
        reduce=f"{MERGING} auto --macs {{share}} {LOOP}",
        calibrate=GROUPED,
        images=True,
    ),
)
OVERFITTING = (
    Method(name="best", reduce=f"--preset best {UNIFORM}", shares=(OVERFITTING_SHARE,)),
    Method(
        name="best, closed loop",
        reduce=f"--preset best {UNIFORM} {LOOP}",
        images=True,
        shares=(OVERFITTING_SHARE,),
    ),
)


class Sparsities:
    """The least uniform sparsity, in percent steps, that leaves at most a share of the dense MACs.

    Widths are rounded as the presets do it; all presets round alike.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.costs, self.dense = model, site_costs(model, "macs"), macs(model)

    def left(self, mlp: float, attention: float | None) -> float:
        """The share of the dense MACs that stays."""
        method = method_from_preset("none", mlp_sparsity=mlp, attention_sparsity=attention)
        widths = uniform_widths(self.model, method)
        return 1.0 - self.costs.saved(sites_of(self.model).every, widths) / self.dense

    def of(self, which: Literal["joint", "mlp"], share: float) -> float:
        """Raises BadInput for a share that no sparsity reaches."""
        for sparsity in (percent / 100 for percent in range(100)):
            if self.left(sparsity, sparsity if which == "joint" else None) <= share:
                return sparsity
        raise BadInput(f"no uniform {which} sparsity leaves {share:g} of the MACs; expected a larger share")


class Schedules:
    """The fewest merged tokens, so many in each block or growing to so many in the last, that leave at most a share.

    A block that can't merge as many merges what it can, as `reduce` does it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.dense = model, macs(model)

    def left(self, text: str) -> float:
        """The share of the dense MACs that stays."""
        merging = merging_from_choice(MergingChoice(merge_tokens=text), self.model)
        return macs(traced_model.with_merging(self.model, merging)) / self.dense

    def of(self, which: Literal["each", "grow"], share: float) -> str:
        """Raises BadInput for a share that no such schedule reaches."""
        texts = [f"{'grow:' if which == 'grow' else ''}{count}" for count in range(1, MOST_MERGED)]
        place = bisect_left(texts, True, key=lambda text: self.left(text) <= share)
        if place == len(texts):
            raise BadInput(
                f"merging {texts[-1]} tokens leaves more than {share:g} of the MACs; expected a larger share"
            )
        return texts[place]


class Settings:
    """What the placeholders of a method stand for at a share of the dense MACs."""

    def __init__(self, model: nn.Module) -> None:
        self.sparsities, self.schedules = Sparsities(model), Schedules(model)

    def at(self, share: float) -> Mapping[str, Callable[[], str]]:
        """By placeholder; nothing is searched for before it is asked for."""
        return {
            "share": lambda: f"{share:g}",
            "joint": lambda: f"{self.sparsities.of('joint', share):g}",
            "mlp": lambda: f"{self.sparsities.of('mlp', share):g}",
            "each": lambda: self.schedules.of("each", share),
            "grow": lambda: self.schedules.of("grow", share),
        }


def words(method: Method, share: float, settings: Settings) -> list[str]:
    """What `reduce` is given for one row, beside the model, moments, images and output."""
    placeholders = {name for _, name, _, _ in Formatter().parse(method.reduce) if name}
    values = {name: value() for name, value in settings.at(share).items() if name in placeholders}
    return method.reduce.format(**values).split()
