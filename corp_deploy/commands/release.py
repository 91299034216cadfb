"""The commands release and check."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from corp_deploy.invocation import values
from corp_deploy.invocation.option import Record, option
from corp_deploy.invocation.option_support import spelled
from corp_deploy.invocation.values import TEXT, Repeated
from corp_deploy.release.baseline import Baseline
from corp_deploy.views.console import Output
from ground.errors import EXIT_FAILED, BadInput
from ground.places import Place

from .command import command
from .options import DIRECTORY, FILE, trust_engine_option, trust_option
from .signing_choice import SigningChoice, VerifyingChoice

if TYPE_CHECKING:
    from corp_deploy.release.incremental import StageStatus
    from corp_deploy.release.run import Job


@dataclass(frozen=True, kw_only=True)
class StarterChoice(Record, heading="A new recipe"):
    """The options of a new recipe. Raises BadInput for files without --init."""

    init_model: str | None = option(TEXT, typed="init", help="Write a starter RECIPE for this directory or timm name.")
    weights: Path | None = option(values.FILE, help="With --init: trained weights for a timm name.")
    images: Place | None = option(values.PLACE, help="With --init: the calibration images, some of which are held out.")
    held_out: Place | None = option(values.PLACE, help="With --init: other images to hold out instead.")
    labels: Path | None = option(
        values.FILE, help="With --init: class indices of the held-out images; without those, of the calibration images."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_model is None and self.non_default:
            raise BadInput(f"{', '.join(map(spelled, self.files))} fill in a new recipe; they go with --init")

    @property
    def files(self) -> dict[str, Place | None]:
        return {name: path for name, path in self.values.items() if name != "init_model"}


@dataclass(frozen=True, kw_only=True)
class RunChoice(Record, heading="How much is done"):
    """The stages of a release to run, or to plan only. Raises BadInput for options that exclude one another."""

    dry_run: bool = option(default=False, help="Show what would be done and why; write nothing.")
    plan_only: bool = option(default=False, help="Write the stages that this machine can't run as a shell script.")
    only: Sequence[str] = option(
        Repeated(),
        (),
        help="Run this stage only, on the results already in the directory; a pattern such as 'bench.*' takes several; "
        "repeatable.",
    )
    again: Sequence[str] = option(
        Repeated(),
        (),
        help="Run this stage although nothing changed, such as 'bench.*' to measure anew; a pattern; repeatable.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.non_default.keys() - {"again"}) > 1:
            raise BadInput("--dry-run, --plan-only and --only exclude one another")


@command(first="output init images dry-run only again baseline init-baseline sign trust-code")
@click.argument("recipe", type=FILE)
@click.option("--output", "-o", type=DIRECTORY, default=None, help="Directory of the release.")
@trust_option
@trust_engine_option
@click.option(
    "--trust-paths", is_flag=True, help="Follow paths of RECIPE that lead out of its directory, and write to them."
)
def release(
    recipe: Path,
    output: Path | None,
    new: StarterChoice,
    run: RunChoice,
    baseline: Baseline,
    signing: SigningChoice,
    trust_paths: bool,
    out: Output,
) -> int:
    """Make a release from a recipe.

    Its model is reduced, exported, proved, measured and judged; finished stages are kept.

    A recipe may name a user's code as its model (module:PATH.py:FUNCTION) and commands that measure outputs; they run
    only with --trust-code. Its paths have to stay below its own directory unless you give --trust-paths.

    --sign signs a release that passes its gate, under the recipe's release.name and release.version: model.sig covers
    every file. --sign sigstore uses the identity of the CI job, which needs the network.

    In GitHub Actions every rule that did not pass annotates the run, and report.md goes to the step's summary.

    Exit codes are the gate's (0 pass, 1 fail, 3 inconclusive, 5 not comparable), and 4 when stages need another
    machine, which has the GPU or runtime of their target.

    Example: corp-deploy release digits.toml -o release --baseline baseline.json --init-baseline
    """
    from corp_deploy.release.incremental import locked_release
    from corp_deploy.release.recipe_file import load_recipe
    from corp_deploy.release.run import Job

    if signing.sign is not None and (new.init_model or run.non_default.keys() - {"again"}):
        raise click.UsageError("--sign signs a whole release; leave out --init, --dry-run, --plan-only and --only")
    if new.init_model is not None:
        return _init(recipe, new.init_model, new, out)
    if output is None:
        raise click.UsageError("give the directory of the release with --output, or write a recipe with --init")
    job = Job(
        recipe=load_recipe(recipe, trust_paths=trust_paths),
        path=recipe,
        root=output,
        baseline=baseline,
        signer=signing.signer(),
        warn=out.warn,
        again=run.again,
    )
    if run.dry_run:
        planned = job.plan()
        open_stages = sum(row.state != "cached" for row in planned)
        _rows(planned, out, f"{open_stages} of {len(planned)} stages are open" if open_stages else "nothing to do")
        return 0
    with locked_release(output):
        return _execute(job, run, out)


def _execute(job: "Job", run: RunChoice, out: Output) -> int:
    """Run a release, run only the stages of --only, or write the script of --plan-only; return the exit code."""
    from corp_deploy.release.pace import Pace

    if run.plan_only:
        script, planned = job.write_script()
        none = f"this machine can do every open stage; {script} has nothing in it"
        then = f"{script}: run it where the targets are, in this directory, then run release again"
        _rows(planned, out, then if planned else none)
    elif run.only:
        outcome = replace(job, starts=Pace(out.note)).run_only(run.only)
        _print_weight_notes(outcome.finished, job.root, out)
        none = "nothing to do: up to date; give --again too to run it anew"
        message = f"made {', '.join(outcome.finished)}" if outcome.finished else none
        out.result({"made": outcome.finished, "cached": outcome.cached}, message)
    else:
        return make_release(job, out)
    return 0


def _init(recipe: Path, model: str, new: StarterChoice, out: Output) -> int:
    from corp_deploy.release.recipe_file import is_inside
    from corp_deploy.release.recipe_toml import require_named, starter
    from corp_deploy.spec.class_labels import labels_file
    from ground.files import write_text

    if recipe.exists():
        raise click.UsageError(f"{recipe} is there already; give another name, or remove it first")
    labels = new.labels and labels_file(new.labels)
    require_named({spelled(name): path for name, path in {**new.files, "labels": labels}.items()})
    named = {"weights": new.weights, "labels": new.labels}
    write_text(recipe, starter(model, recipe, images=new.images, held_out=new.held_out, **named))
    sources = (*new.files.values(), Path(model) if Path(model).is_dir() else None)
    outside = any(path and not is_inside(path.resolve(), recipe.parent.resolve()) for path in sources)
    trust = " --trust-paths, as it names files beyond its directory" * outside
    out.result({"recipe": str(recipe)}, f"{recipe}: written; look through it, then run release {recipe} -o DIR{trust}")
    return 0


def _rows(planned: "Sequence[StageStatus]", out: Output, note: str) -> None:
    from rich.table import Table

    from corp_deploy.views.console import long_reasons, reason_cell

    table = Table("stage", "", "why")
    for row in planned:
        table.add_row(row.stage, row.state, reason_cell(row.why))
    below = long_reasons((row.stage, row.why) for row in planned)
    out.result({"stages": [asdict(row) for row in planned], "notes": [note]}, table, *below, note)


def _print_weight_notes(finished: Sequence[str], output: Path, out: Output) -> None:
    from corp_deploy.store.model_config import load_model_config

    if "dense" in finished:
        lineage = load_model_config(output / "dense").lineage
        for note in lineage.get("source", {}).get("notes", ()):
            out.note(note)


SIGNATURES = {
    "signed": "signed: model.sig",
    "kept": "signed already: model.sig",
    "removed": "model.sig is removed: it covered other files; sign with --sign",
    "refused": "not signed, as the gate did not pass",
}


def make_release(job: "Job", out: Output, *closing: str) -> int:
    """Make a release, and print its result with the lines `closing`; return the exit code."""
    from corp_deploy.formats.annotations import annotate_run
    from corp_deploy.release.names import PARITY
    from corp_deploy.release.pace import Pace, limited_seconds
    from corp_deploy.views.parity import gate_shown
    from ground.files import text_from_file
    from perf.parity.parity import load_parity

    pace, output = Pace(out.note, seconds=limited_seconds(job.recipe)), job.root
    released = replace(job, starts=pace, planned=pace.plan).release()
    outcome = released.outcome
    _print_weight_notes(outcome.finished, output, out)
    record = {
        "directory": str(output),
        "made": outcome.finished,
        "cached": outcome.cached,
        "blocked": dict(outcome.blocked),
        "gate": released.verdict,
        "signature": released.signature,
    }
    for sentence in released.warnings:
        out.warn(sentence)
    if released.gate is None:
        out.result(record, "stages are left for another machine; --plan-only writes them as a script", *closing)
        return released.exit_code
    signature = "" if released.signature is None else f"; {SIGNATURES[released.signature]}"
    done, kept = len(outcome.finished), len(outcome.cached)
    summary = f"{done} stages done, {kept} kept as they were"
    summary = summary if done else f"nothing to do: all {kept} stages are up to date"
    accuracy = load_parity(output / PARITY).accuracy_lines
    verdict = f"{output}: gate {released.verdict}{signature}"
    out.result(record, summary, *gate_shown(released.gate), *accuracy, verdict, *closing)
    for line in annotate_run(released.gate, text_from_file(output / "report.md"), os.environ):
        click.echo(line, err=True)
    return released.exit_code


@command()
@click.argument("directory", type=DIRECTORY)
def check_command(directory: Path, verifying: VerifyingChoice, out: Output) -> int:
    """Verify a release by its digests and sample inputs.

    The sample inputs are replayed in ONNX Runtime. Exit code 1 if anything differs.

    With --verify its signature comes first, before any file of it is parsed: by a public key, by an identity in a
    certificate that chains to --root, or by one from Sigstore (--issuer; this needs the network). Older releases have
    valid signatures too: give --expect-version to say which one it has to be.

    Example: corp-deploy check release --verify key.pub.pem --expect-name vit --expect-version 1.2.0
    """
    from corp_deploy.release.check import check_release

    expected = verifying.expected()
    checked = check_release(directory, expected)
    if verifying.verify is not None and verifying.expect_version is None and checked.signed_by:
        out.warn(f"the signature of any version is accepted, this is {checked.version}; give --expect-version")
    why = "as files differ" if checked.differs else "a repository has none"
    replayed = "samples replayed" if checked.graphs_replayed else f"samples not replayed, {why}"
    verdict = f"{len(checked.differs)} differ" if checked.differs else "all as they were made"
    line = f"{directory}: {checked.files} files, {replayed}: {verdict}"
    if expected is not None:
        named = f"{checked.name} {checked.version}, signed by {checked.signed_by}"
        line = f"{line}; {named}" if checked.signed_by else f"{directory}: not verified"
    out.result(asdict(checked), *checked.differs, line)
    return EXIT_FAILED if checked.differs else 0
