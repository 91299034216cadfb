"""Checks, before any stage runs, that the files a recipe names exist, can be read, and fit one another.

Torch is imported only if a file has to be read with it.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from corp_deploy.families.timm_names import require_local_name
from corp_deploy.proof.custom_metrics import require_runnable
from corp_deploy.spec import trusted_code
from corp_deploy.spec.architecture import OF_TORCHVISION
from corp_deploy.store.hub_snapshot import CONFIG, config_of_directory, is_ours, refuse_beside_directory
from ground.errors import BadInput
from ground.outputs import require_writable
from ground.places import Url
from perf.stats.releases import require_directory

from . import incremental
from .baseline import Baseline
from .digests import IMAGE_LABELS, files_of
from .incremental import Stage, StageStatus
from .recipe import Recipe, trusted_metrics
from .recipe_keys import RecipeProblems
from .recipe_tables import ModelTable

OF_OPTIONS = "gate"
"""The stage whose inputs outside the release are named by options of the command, not by the recipe."""
FOLDERS = ("model", *IMAGE_LABELS)
"""The labels of inputs that may be folders."""
KEYS = {"model": "model.model", "weights": "model.weights"}
"""The recipe's keys for labels of stages' inputs that are not keys themselves."""
FITTING = ("reduce", "export.dense")
"""The stages that read nothing outside the release, but whose keys have to fit the model."""


def _require_directory(directory: Path, model: ModelTable) -> None:
    """Raise BadInput for a file, for a model of texts, and for keys of [model] that config.json has already."""
    if directory.is_file():
        raise BadInput(
            f"{directory} is a file, expected the directory of a model; to use a file of weights, set model.weights to "
            "it, and model.model to a timm name"
        )
    if not directory.is_dir():
        return
    config = config_of_directory(directory)
    if model.prefix:
        if "vocab_size" in config:
            kind = config.get("model_type")
            raise BadInput(
                f"{directory / CONFIG}: model_type is {kind!r:.60}, a model of texts, expected one of images"
            )
    elif is_ours(config):
        others = {f"model.{key}": value for key, value in model.values.items() if key not in ("name", "outputs")}
        refuse_beside_directory(directory, others)


def _require_model(model: ModelTable, mistakes: RecipeProblems) -> None:
    with mistakes.at("model.model"):
        if model.code is not None:
            trusted_code.refuse_untrusted(model.code.name)
        elif model.directory is not None:
            _require_directory(model.directory, model)
        elif model.name.startswith(OF_TORCHVISION):
            from corp_deploy.families import torchvision_models  # which imports torch

            torchvision_models.require_classifier(model.name)
        else:
            require_local_name(model.name)
    if model.code is None and model.directory is None and model.weights is None:
        library = "torchvision" if model.name.startswith(OF_TORCHVISION) else "timm"
        mistakes.add(f"model.weights: the {library} model {model.name!r:.100} needs the weights of a trained model")


def _absent(stages: Sequence[Stage]) -> Iterator[str]:
    """Yield a sentence for each input outside the release that is absent or empty, or a folder in place of a file."""
    outside = {label: path for stage in stages if stage.name != OF_OPTIONS for label, path in stage.outside.items()}
    for label, path in outside.items():
        key = KEYS.get(label, label)
        if isinstance(path, Url):  # which is opened if a stage has to run
            continue
        if not files_of(path) and not (label in IMAGE_LABELS and path.is_dir() and any(path.iterdir())):
            home = " (~ is not expanded in a recipe)" if "~" in path.parts else ""
            yield f"{key}: {path} is not there, or is empty{home}; correct the recipe"
        elif path.is_dir() and label not in FOLDERS:
            yield f"{key}: {path} is a folder, expected a file; correct the recipe"


def _require_metrics(recipe: Recipe, root: Path, beside: Path, mistakes: RecipeProblems) -> None:
    """Add to `mistakes` commands of parity.metric that can't run in the directory `root` or read undeclared files."""
    untold = recipe.parity.undeclared_files(beside, root)
    for word in untold:
        mistakes.add(
            f"parity.metric_files: a command of parity.metric names {word!r}, a file beside the recipe, but runs in "
            "the directory of the release; add the file to parity.metric_files"
        )
    with mistakes.at():
        requests = trusted_metrics(recipe.parity.metrics(root))
        if not untold:
            with mistakes.at("parity.metric"):
                require_runnable(requests, below=root)


def _note_absent(recipe: Recipe, root: Path, stages: Sequence[Stage], path: Path, mistakes: RecipeProblems) -> None:
    names = {stage.name for stage in stages}
    if "dense" in names:
        _require_model(recipe.model, mistakes)
    for words in _absent(stages):
        mistakes.add(words)
    if any(name.startswith("parity") for name in names):
        _require_metrics(recipe, root, path.parent, mistakes)
    history = recipe.gate.history
    if "reduce" in names and recipe.reduce.latency_tables is not None:
        tables = Path(recipe.reduce.latency_tables)
        standing = next(place for place in (tables, *tables.parents) if place.exists())
        if not standing.is_dir():
            words = f"{standing} is a file, expected the folder where measured tables are kept; give another"
            mistakes.add(f"reduce.latency_tables: {words}")
        else:
            with mistakes.at("reduce.latency_tables"):
                require_writable(tables, folder=True)
    if OF_OPTIONS in names and history is not None:
        with mistakes.at("gate.history"):
            require_directory(history)
            if history.resolve() == root.resolve():
                raise BadInput(f"{root} is the output of this release; give another directory")


def require_inputs(
    recipe: Recipe, root: Path, stages: Sequence[Stage], baseline: Baseline, *, path: Path, warn: Callable[[str], None]
) -> list[StageStatus]:
    """Check the inputs of stages outside the release, and return the stages' states.

    All inputs have to exist; those of stages that are not done also have to be readable and to fit. Nothing is written.
    `path` is the recipe's file; `warn` is called with warnings that the stages would give, such as too few images.

    Raises BadInput with a line for each mistake, Missing if this machine can't read one of the files.
    """
    mistakes = RecipeProblems(path)
    _note_absent(recipe, root, stages, path, mistakes)
    mistakes.refuse()
    if any(stage.name == OF_OPTIONS for stage in stages):
        baseline.require(recipe.rules)
    statuses = incremental.stage_statuses(stages, root)
    left = [stage for stage, status in zip(stages, statuses, strict=True) if status.state != "cached"]
    if any(stage.name in FITTING or (stage.outside and stage.name != OF_OPTIONS) for stage in left):
        from .recipe_read import read_inputs

        read_inputs(recipe, root, left, mistakes, warn)
        mistakes.refuse()
    return statuses
