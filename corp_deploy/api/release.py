"""The function corp_deploy.ship."""

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from calib.batches import Batches
from corp_deploy.families.given_module import NAME as MEMORY
from corp_deploy.invocation.budget_choice import BudgetChoice, Limit
from corp_deploy.invocation.calibration import PassOptions
from corp_deploy.invocation.engine import ShipFiles, ShipOptions, TargetName
from corp_deploy.invocation.input_choice import Drawn
from corp_deploy.invocation.option import Labels, declared
from corp_deploy.invocation.running import BenchOptions
from corp_deploy.invocation.source import ModelSource
from corp_deploy.proof.engine_trust import trusting_engines
from corp_deploy.release.incremental import STATE, locked_release
from corp_deploy.release.names import RECIPE, SUMS
from corp_deploy.release.recipe_file import resolve_toml_source
from corp_deploy.release.ship import ShipRequest, job_to_ship
from corp_deploy.release.signature import sums_from_file
from corp_deploy.spec.trusted_code import trusting_code
from corp_deploy.store.checkpoint import save
from ground.errors import BadInput
from ground.places import Place
from perf.gate.gate import Gate

from .in_python import function_from_record, message_in_python
from .models import Directory, OnInputs, PathLike, Source, Written, in_memory, open_model
from .values import InputsLike, as_file, entry_of_labels, given_inputs, install_changed, labels_as_file

IN_MEMORY = "in-memory"
"""The folder, below the state of the stages, for the files of models, inputs and labels in memory."""
NAMED = (
    "a recipe can't name it; write a function that returns it, and give "
    "Source('module:PATH.py:FUNCTION', trust_code=True)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Written):
    """A release, by the `path` of its directory, which `os.fspath` returns too.

    `gate` has the verdict of every rule; it and `verdict` are None, and `exit_code` is 4, while `blocked` stages need
    another machine. `made` are the stages that ran, `cached` those whose earlier results were kept, and `blocked` has
    the reason for each stage that waits. `files` has the SHA-256 of every file of a whole release.
    """

    verdict: str | None
    exit_code: int
    gate: Gate | None
    made: tuple[str, ...]
    cached: tuple[str, ...]
    blocked: Mapping[str, str]
    files: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ShipCall(Drawn, ShipFiles, OnInputs):
    """The parameters of `ship`."""

    held_out: InputsLike | None = None
    labels: Labels | None = None
    macs: float | None = declared(BudgetChoice, "macs", None)
    params: float | None = declared(BudgetChoice, "params", None)
    latency: float | None = declared(BudgetChoice, "latency", None)
    within: Limit | str | None = declared(BudgetChoice, "within", None)
    latency_tables: PathLike | None = declared(BudgetChoice, "latency_tables", None)
    target: TargetName | None = declared(ShipOptions, "target", None)
    precision: Sequence[str] = declared(ShipOptions, "precision", ("fp32", "fp16"))
    device: Literal["cpu", "cuda"] = declared(PassOptions, "device", "cpu")
    batches: Sequence[int] = declared(BenchOptions, "batches", (1, 8, 32))
    time_limit: float = declared(BenchOptions, "time_limit", 20.0)
    launches: int = declared(BenchOptions, "launches", 1)
    trust_engine: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.budget

    @property
    def budget(self) -> BudgetChoice:
        return BudgetChoice.from_options({name: each for name, each in self.values.items() if name != "labels"})


def _named_source(call: ShipCall, given: Place | Batches, folder: Path) -> ModelSource:
    """Return a source that a recipe can name; a module that a library makes is written to `folder` for that.

    Raises BadInput for a module that no library makes, and for a directory that needs such a module beside it.
    """
    named = call.model if isinstance(call.model, Source) else Source(call.model)
    module, place = in_memory(named), named.name
    if module is None:
        beside = place.module if isinstance(place, Directory) else named.module
        if beside is not None:
            raise BadInput(f"model: the directory needs its {type(beside).__name__} in memory, and {NAMED}")
        return resolve_toml_source(named)
    with open_model(named, given) as checkpoint:
        if checkpoint.architecture.family == MEMORY:
            raise BadInput(f"model: no library makes {type(module).__name__}, so {NAMED}")
        with TemporaryDirectory(dir=folder) as scratch:
            save(checkpoint, Path(scratch) / "model")
            install_changed(Path(scratch), folder)
    return ModelSource(folder / "model")


@contextmanager
def _request(call: ShipCall, folder: Path) -> Iterator[ShipRequest]:
    """Yield the request of a call, with what is in memory written to `folder`."""
    with ExitStack() as stack:
        entry = entry_of_labels(call.labels, call.inputs if call.held_out is None else call.held_out)
        given = given_inputs(call.inputs, labels=entry)
        source = _named_source(call, given, folder)
        images = stack.enter_context(as_file(given, folder=folder))
        held_out, labels, judged = None, None if entry else call.labels, given
        if call.held_out is not None:
            judged = given_inputs(call.held_out, name="held_out", labels=entry)
            held_out = stack.enter_context(as_file(judged, name="held_out.npy", folder=folder))
        if labels is None and isinstance(judged, Batches):
            labels = judged.labels
        if labels is not None:
            labels = Path(stack.enter_context(labels_as_file(labels, folder)))
        options = ShipOptions(
            images=images, held_out=held_out, labels=labels, target=call.target, precision=call.precision
        )
        yield ShipRequest(
            source=source,
            options=options,
            drawn=Drawn.from_options(call.values),
            budget=call.budget,
            timed=BenchOptions(batches=call.batches, time_limit=call.time_limit, launches=call.launches),
            run=PassOptions(device=call.device),
        )


@contextmanager
def _folder_in_memory(root: Path) -> Iterator[Path]:
    """Yield the folder for what is in memory, for a caller with the release's lock; remove it if there is no recipe."""
    folder = root.resolve() / STATE / IN_MEMORY
    folder.mkdir(exist_ok=True)
    for unfinished in folder.glob("tmp*"):  # left by a killed process
        shutil.rmtree(unfinished)
    try:
        yield folder
    finally:
        if not (root / RECIPE).exists() or not any(folder.iterdir()):
            shutil.rmtree(folder)


@function_from_record(ShipCall)
def ship(call: ShipCall) -> Release:
    """Make a release of a model and images in the directory `output`, as the command `ship` does.

    The model is calibrated, reduced, exported, proved, timed beside the dense model, judged, and packed for a server.
    Without a budget 70 % of the MACs are kept. `inputs` are unlabelled images; without `held_out` some of them, to
    which nothing is fitted, prove the result. `labels` are class indices of `held_out`, or of all `inputs` without it:
    an array, a list, a file, a mapping from file names, the word folders, or the name of an entry of batches that are
    dicts; of batches that are tuples the second entry is taken. They add accuracy.

    `output`/recipe.toml has all settings. What is in memory is written below `output`/.stages once, so that
    the command `release` can repeat the release. The same call continues after an interruption, and reuses the stages
    whose inputs did not change. Warns about doubtful inputs and results.

    Returns the release. A gate that fails (exit code 1), is inconclusive (3) or not comparable (5), and stages that
    need another machine (4) raise nothing. Raises BadInput for a model that a recipe can't name, for too few images,
    for options that differ from those of the recipe in `output`, and for engines that were not built here unless
    `trust_engine`.
    """
    root = Path(call.output)
    trusts_code = isinstance(call.model, Source) and call.model.trust_code

    def warn(sentence: str) -> None:
        warnings.warn(message_in_python(sentence, ShipCall), stacklevel=2)

    with ExitStack() as stack:
        stack.enter_context(trusting_code(trusts_code))
        stack.enter_context(trusting_engines(call.trust_engine))
        stack.enter_context(locked_release(root))
        request = stack.enter_context(_request(call, stack.enter_context(_folder_in_memory(root))))
        released = stack.enter_context(job_to_ship(request, root, warn)).release()
        for sentence in released.warnings:
            warn(sentence)
        outcome = released.outcome
        return Release(
            path=root,
            verdict=released.verdict,
            exit_code=released.exit_code,
            gate=released.gate,
            made=outcome.finished,
            cached=outcome.cached,
            blocked=dict(outcome.blocked),
            files={} if released.gate is None else sums_from_file(root / SUMS),
        )
