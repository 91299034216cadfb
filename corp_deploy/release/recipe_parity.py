"""The table [parity] of a recipe as a type. Imports no torch."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corp_deploy.families.trusted_code import refuse_untrusted
from corp_deploy.invocation.call import path_from
from corp_deploy.invocation.table import VERIFY_HEADS
from corp_deploy.proof.metric_request import OUTPUTS, MetricRequest, metrics_from_texts
from ground.errors import BadInput
from ground.quantity import shown
from perf.parity.maps import THRESHOLD
from perf.stats.stats import DEFAULT_CONFIDENCE

from . import recipe_values
from .recipe_table import Table, refuse_ignored


class ParityTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    batches: recipe_values.Batches = (1, 7, 32)
    min_agreement: recipe_values.Share | None = None
    max_error: recipe_values.RelativeError | None = None
    half_factor: recipe_values.Factor = 4.0
    quantised_factor: recipe_values.Factor = 2.0
    max_apart: recipe_values.Share = 0.05
    head: recipe_values.Locations = ()
    map_threshold: recipe_values.Level = THRESHOLD
    max_map_error: recipe_values.RelativeError | None = None
    min_iou: recipe_values.Share | None = None
    min_pixels: recipe_values.Share | None = None
    confidence: recipe_values.Confidence = DEFAULT_CONFIDENCE
    metric: recipe_values.Texts = ()
    metric_files: recipe_values.Locations = ()

    def __post_init__(self) -> None:
        asked = self._of_maps | {"map_threshold": None if self.map_threshold == THRESHOLD else self.map_threshold}
        refuse_ignored("[parity]", VERIFY_HEADS, self._way, asked)
        if self.confidence != DEFAULT_CONFIDENCE and not self.has_shares:
            raise BadInput(
                f"parity.confidence is {self.confidence:g}, of the interval of a share of inputs, and none has a "
                "limit; give min_agreement, or min_pixels with a head"
            )
        if self.metric_files and not self.metric:
            raise BadInput("parity.metric_files are what the commands of parity.metric read, and there are none")
        names = [path.name for path in self.metric_files]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BadInput(f"parity.metric_files: two are called {twice!r}, by which commands name them; rename one")
        for request in metrics_from_texts(self.metric):
            if request.is_code:
                raise BadInput(
                    f"parity.metric {request.name}: a recipe takes commands, such as 'python score.py {{outputs}}'"
                )

    def metrics(self, directory: Path) -> list[str]:
        """The commands as they are run in the directory: what names one of the files by its name names it by its path
        from there.
        """
        paths = {path.name: path_from(directory, path) for path in self.metric_files}
        return [_located(request, paths) for request in metrics_from_texts(self.metric)]

    def untold_files(self, beside: Path, directory: Path) -> list[str]:
        """Words of the commands that name files beside the recipe, which none of the files told of is, nor one of the
        directory that they are run in.
        """
        told = {path.name for path in self.metric_files}
        words = (word for request in metrics_from_texts(self.metric) for word in request.words if OUTPUTS not in word)
        return [
            word
            for word in dict.fromkeys(words)
            if Path(word).name not in told and (beside / word).is_file() and not (directory / word).is_file()
        ]

    @property
    def has_shares(self) -> bool:
        """Whether a share of inputs has a limit, which an interval has to keep to."""
        return self.min_agreement is not None or self.min_pixels is not None

    @property
    def limits(self) -> dict[str, Any]:
        """What the reduced model may differ by, under the names that the proof has for it."""
        names = ("min_agreement", "max_error", "half_factor", "quantised_factor", "max_apart", "confidence")
        return {name: getattr(self, name) for name in names} | self._of_maps

    @property
    def _way(self) -> str:
        return "some" if self.head else "none"

    @property
    def _of_maps(self) -> dict[str, Any]:
        return {"max_map_error": self.max_map_error, "min_iou": self.min_iou, "min_pixels": self.min_pixels}

    @property
    def of_maps(self) -> dict[str, Any]:
        """What is asked of heads' maps, as `verify` takes it; nothing without heads."""
        return VERIFY_HEADS.honoured(self._way, {"map_threshold": self.map_threshold} | self._of_maps)


def trusted_metrics(texts: Sequence[str]) -> tuple[MetricRequest, ...]:
    """The measures of a recipe, whose commands nobody typed. Raises BadInput where code isn't trusted."""
    requests = metrics_from_texts(texts)
    for request in requests:
        refuse_untrusted(f"parity.metric: {shown(request.command)}", to="measure outputs")
    return tuple(requests)


def _located(request: MetricRequest, paths: Mapping[str, str | None]) -> str:
    words = (paths.get(Path(word).name) or word for word in request.words)
    return f"{request.name}={shlex.join(words).replace(shlex.quote(OUTPUTS), OUTPUTS)}"
