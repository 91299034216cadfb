"""The class corp_deploy.Collector and the function corp_deploy.merge_moments, for calibrations in parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from calib.batches import Batches
from calib.calibrate import refuse_too_many_sums
from calib.collect import Collector as SumsCollector
from calib.draw import digest_of_contents
from calib.moments import Moments
from calib.products import Kernel
from corp_deploy.invocation.calibration import PassOptions, StatisticsOptions
from corp_deploy.invocation.input_choice import Decoded
from corp_deploy.invocation.merging import MergedStatistics
from corp_deploy.invocation.option import PathLike, declared
from corp_deploy.planning.request import apply_merging_choice
from corp_deploy.reduction.calibrate import collector_for
from corp_deploy.reduction.moments_files import merge_files, save_with_warnings
from corp_deploy.reduction.steady_inputs import require_steady_on
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import batches_for_model, lineage_for_moments
from ground.errors import BadInput
from ground.gpu import require_device

from .calibration import Calibration
from .in_python import errors_in_python
from .models import ModelLike, OfModel, open_model

MOST_IN_ONE = 2**20  # inputs of one batch


def first_row(inputs: Any) -> Any:
    """Return the first input of a batch, as a batch of one."""
    return {name: each[:1] for name, each in inputs.items()} if isinstance(inputs, Mapping) else inputs[:1]


@dataclass(frozen=True, kw_only=True)
class CollectCall(MergedStatistics, StatisticsOptions, OfModel):
    """The parameters of `Collector`."""

    device: Literal["cpu", "cuda"] = declared(PassOptions, "device", "cpu")
    max_bad: int = declared(Decoded, "max_bad", 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attn:
            raise BadInput("--attn ranks dimensions by a pass of its own, and a collector takes one; call calibrate")


@dataclass(frozen=True, slots=True)
class _Progress:
    """The part of a collector that a copy in another process continues from."""

    moments: Moments
    kernel: Kernel
    contents: tuple[bytes, ...]
    bad: tuple[str, ...]


class Collector:
    """Second-order statistics of a model over batches that are given one after the other.

    A collector can be pickled if its model can, and continues in another process. Parts that several collectors wrote
    are added by `merge_moments`, which refuses an image that is in two of them. `images` is the number of inputs so
    far, and `digest` the SHA-256 of their contents in order, by which a part can be named. `options` are those of
    `calibrate` on statistics and merged tokens, with `device` and `max_bad`.

    Raises BadInput for options that contradict one another, and for a model that can't be loaded or has no site.
    """

    def __init__(self, model: ModelLike, **options: Any) -> None:
        with errors_in_python(CollectCall):
            self._call = CollectCall(model, **options)
        require_device(self._call.device)
        self._opened: tuple[Checkpoint, nn.Module, SumsCollector] | None = None
        self._contents = list[bytes]()
        self._bad = list[str]()
        self._shown: Any = None
        self._is_checked = False
        if not isinstance(model, nn.Module):  # a module in memory shows its inputs with the first batch
            self._open(None)

    @property
    def images(self) -> int:
        return 0 if self._opened is None else self._opened[2].images

    @property
    def digest(self) -> str:
        return digest_of_contents((str(place), content) for place, content in enumerate(self._contents))

    def _open(self, example: Batches | None) -> tuple[Checkpoint, nn.Module, SumsCollector]:
        if self._opened is None:
            with errors_in_python(CollectCall), open_model(self._call.model, example) as loaded:
                dense = apply_merging_choice(loaded, self._call)
                self._opened = (dense, *collector_for(dense, self._call.statistics, self._call.device))
        return self._opened

    def update(self, batch: Any) -> None:
        """Run a batch through the model and add its statistics.

        Args:
            batch: A tensor or array [B,...], or a tuple or dict whose first entry is one, as a DataLoader yields it.

        Raises:
            BadInput: The model doesn't take the batch, more than `max_bad` inputs so far hold NaN or Inf, activations
                are not finite, or memory is too small.
        """
        given = Batches([batch])
        with errors_in_python(CollectCall):
            dense, model, collector = self._open(given)
            inputs = batches_for_model(dense.model, given, max_bad=self._call.max_bad)
            if self._shown is None:
                self._shown = first_row(given.first.inputs)
            if not self._is_checked:  # not for each part: this takes as long as many images
                require_steady_on(model, inputs)
                refuse_too_many_sums(collector, inputs.example())
                self._is_checked = True
            for read in inputs.read(MOST_IN_ONE, bad=self._bad):
                with collector:
                    collector.update(read)
                self._bad += read.bad
            self._contents += [inputs.known[place] for place in sorted(inputs.known)]

    def moments(self, output: PathLike) -> Calibration:
        """Write the moments of all batches since the beginning or the last `clear` to a file (.safetensors).

        Raises BadInput without a batch.
        """
        if self._opened is None or not self.images:
            raise BadInput("moments: no batch was collected; call update first")
        dense, _, collector = self._opened
        lineage = {**lineage_for_moments(dense), "dtype": collector.options.precision}
        moments = collector.moments(lineage | {"images": self.digest})
        record = save_with_warnings(dense, moments, Path(output))
        return Calibration(path=Path(output), held_out=None, inputs=moments.images, record=record)

    def clear(self) -> None:
        """Begin again with the same model, without a batch."""
        self._contents, self._bad = [], []
        if self._opened is not None:
            dense, model, old = self._opened
            new = SumsCollector(old.model, old.sites, device=old.device, options=old.options)
            self._opened = dense, model, new

    def __getstate__(self) -> dict[str, Any]:
        progress = None
        if self._opened is not None and self.images:
            collector = self._opened[2]
            assert collector.kernel is not None, self.images
            progress = _Progress(collector.moments({}), collector.kernel, tuple(self._contents), tuple(self._bad))
        return {"call": self._call, "shown": self._shown, "progress": progress}

    def __setstate__(self, state: dict[str, Any]) -> None:
        progress: _Progress | None = state["progress"]
        self._call, self._shown, self._opened = state["call"], state["shown"], None
        self._is_checked = False
        self._contents = [] if progress is None else list(progress.contents)
        self._bad = [] if progress is None else list(progress.bad)
        if self._shown is not None or not isinstance(self._call.model, nn.Module):
            collector = self._open(None if self._shown is None else Batches([self._shown]))[2]
            if progress is not None:
                collector.resume_from(progress.moments, progress.kernel)


def merge_moments(parts: Sequence[PathLike], output: PathLike) -> Calibration:
    """Add the moments of separate calibrations over different images, and write the sum to `output`.

    Raises BadInput for moments of another model or preprocessing, and for an image that is in two parts, naming them.
    """
    record = merge_files([Path(part) for part in parts], Path(output))
    return Calibration(path=Path(output), held_out=None, inputs=int(record["images"]), record=record)
