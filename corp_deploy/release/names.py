"""The names of a release's files, relative to its directory, and the summary of its moments. Imports no torch."""

from pathlib import Path

import msgspec

from corp_deploy.store.manifest import MANIFEST
from ground.records import Natural, record_from_file

from .recipe import Recipe
from .targets import SUBJECTS, ReleaseTarget

__all__ = ["MANIFEST", "SUBJECTS"]

RECIPE = "recipe.toml"
SUMS = "SHA256SUMS"
BILL = "sbom.cdx.json"
PROVENANCE = "provenance.json"
ATTESTATION = "provenance.intoto.jsonl"
"""The provenance in a signed envelope."""
SIGNATURE = "model.sig"
SCRIPT = "remaining.sh"
MODELS = {subject: (f"{subject}/config.json", f"{subject}/model.safetensors") for subject in SUBJECTS}
BOTH_MODELS = (*MODELS["dense"], *MODELS["reduced"])
SAVED_AS_HF = "reduced/hf/"
MOMENTS = ".stages/moments.safetensors"
HELD_OUT_MOMENTS = ".stages/moments.held-out.safetensors"
SUMMARY, SUMMARY_KIND = "moments.json", "corp-deploy/moments-reference"
SIZE = "calibration-size.json"
SAMPLES = "samples/images.npy"
SAMPLES_RECORD = "samples/samples.json"
SAMPLE_LABELS = "samples/labels.npy"
PARITY = "parity.json"
PARITY_OF_TARGET = "parity."
"""The prefix of the names of stages that prove a target's artefact, and of their records."""
BENCH = "bench.json"
GATE = "gate.json"
HISTORY = ("history.json", "history.svg")
CARD = "MODEL_CARD.md"
REPORTS = ("report.html", "report.md", "report.xml")
REPOSITORY = "repository"
AGAIN = "make the release again with `corp-deploy release`"
"""The remedy for a record of a release that can't be read."""


class MomentsSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of moments.json that the card and the bill of materials show."""

    images: Natural
    sha256: str
    size_bytes: int
    warnings: tuple[str, ...] = ()


def load_moments_summary(root: Path) -> MomentsSummary:
    return record_from_file(root / SUMMARY, MomentsSummary, kind=SUMMARY_KIND, remedy=AGAIN)


def snapshots_of(recipe: Recipe) -> tuple[str, ...]:
    return tuple(f".stages/moments.{count}.safetensors" for count in recipe.calibration.snapshots or ())


def has_sample_labels(recipe: Recipe) -> bool:
    """Return True if the samples have labels, which metrics of [parity] read."""
    return bool(recipe.parity.metric) and recipe.held_out.labels is not None


def graph_name(precision: str) -> str:
    return "model.onnx" if precision == "fp32" else f"model.{precision}.onnx"


def graphs_of(recipe: Recipe, subject: str) -> tuple[str, ...]:
    return tuple(f"{subject}/{graph_name(precision)}" for precision in recipe.export.precisions)


def answers_name(subject: str, precision: str) -> str:
    return f"samples/{subject}.{precision}.npy"


def plan_name(target: ReleaseTarget, subject: str) -> str:
    """Return the relative path of an engine: in the folder of its graph, where `package` looks for it."""
    return f"{subject}/model.{target.name}.plan"


def artefact_name(target: ReleaseTarget, subject: str) -> str:
    return plan_name(target, subject) if target.is_engine else f"{subject}/{graph_name(target.precision)}"


def rival_name(target: ReleaseTarget) -> str:
    """Return the path of the reduced model's engine or graph in `rest`, which a quantised target has to beat."""
    assert target.rest is not None, target
    if target.is_engine:
        return f"rivals/model.{target.name}.{target.rest}.plan"
    return f"reduced/{graph_name(target.rest)}"


def gain_name(target: ReleaseTarget) -> str:
    return f"gain.{target.name}.json"


def bench_name(recipe: Recipe, target: ReleaseTarget) -> str:
    return BENCH if target == recipe.targets[0] else f"bench.{target.name}.json"


def parity_name(target: ReleaseTarget) -> str:
    """Return parity.json for ONNX Runtime on the CPU, and a record of its own for any other target."""
    return PARITY if target.name == "onnxruntime-cpu" else f"parity.{target.name}.json"


def outputs_name(parity: str) -> str:
    return f"{parity.removesuffix('.json')}.npz"


def parities_of(recipe: Recipe) -> tuple[str, ...]:
    return tuple(dict.fromkeys((PARITY, *map(parity_name, recipe.targets))))


def page_name(target: ReleaseTarget) -> str:
    return f"report.{target.name}.html"


def own_records(recipe: Recipe, root: Path) -> dict[str, Path]:
    """Return the paths of the first target's records by kind ("bench", "parity"); the rules of [gate] judge these."""
    first = recipe.targets[0]
    return {"bench": root / bench_name(recipe, first), "parity": root / parity_name(first)}
