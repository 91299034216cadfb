"""The older records that rules compare with, on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import FILE, value_options

if TYPE_CHECKING:
    from corp_deploy.release.baseline import Baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineChoice:
    """The older records that rules compare with; whether they are such is looked at when they are used."""

    baseline: Path | None
    baseline_parity: Path | None
    init_baseline: bool

    def value(self) -> "Baseline":
        from corp_deploy.release.baseline import Baseline

        return Baseline(path=self.baseline, init=self.init_baseline, parity=self.baseline_parity)


baseline_options = value_options(
    "baseline",
    BaselineChoice,
    click.option("--baseline", type=FILE, default=None, help="The older bench.json that `baseline` in a rule means."),
    click.option(
        "--baseline-parity",
        type=FILE,
        default=None,
        help="The older parity.json that `baseline` means in rules on its figures, on the same inputs.",
    ),
    click.option(
        "--init-baseline", is_flag=True, help="Make the records that are judged the baselines if they pass and none is."
    ),
)
