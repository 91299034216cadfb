"""The commands gate and report."""

import os
from dataclasses import asdict
from pathlib import Path

import click

from corp_deploy.invocation.proof import GateOptions
from corp_deploy.release.baseline import Baseline
from corp_deploy.views.console import Output

from .command import command
from .options import DIRECTORY, FILE


@command(first="output fail-if confidence history track metrics baseline baseline-parity init-baseline")
@click.argument("records", nargs=-1, required=True, type=FILE)
@click.option(
    "--output",
    "-o",
    type=FILE,
    multiple=True,
    help="File to write; its suffix chooses the format: .json (the record), .md or .xml (JUnit); repeat for several.",
)
def gate_command(
    records: tuple[Path, ...], options: GateOptions, baseline: Baseline, output: tuple[Path, ...], out: Output
) -> int:
    """Judge records of bench and verify by rules.

    The verdict is PASS, FAIL, INCONCLUSIVE, NOT-COMPARABLE, or UNJUDGED without a rule or limit that judges anything.

    A figure with an interval (a time, a speed-up, a share of inputs) passes a rule if no part of the interval breaks
    it, and fails if all of it does; in between it is INCONCLUSIVE, and the message says how much more data would
    decide. --confidence sets these intervals, as in verify.

    The verdict of parity.json counts as well, with verify's confidence. Each output of the model must be judged by one
    of verify's limits or by a rule here, unless verify excluded it by name: otherwise the gate is INCONCLUSIVE. The
    rule relative_error judges every output that has this figure; relative_error@boxes judges the output boxes. With
    labels, accuracy is a figure: 'accuracy < dense - 0.005' judges the paired difference on the same images.

    If a record knows which images the model was fitted to, the rule 'fitted_images > 0' is added, unless you give one
    on fitted_images.

    --history fails when the time rose by 1 % or more at one of the last five releases and is still up. Changes are
    found by Student's t over every split of the releases, tested after each of them; fewer than 1 in 20 histories of 30
    releases without a change show one. If all releases have the same dense model, the speed-up over it is judged, since
    changes of the dense model's time are the machine's: a rise of 3 % is found within two releases. Otherwise the
    reduced model's median is judged, which finds such a rise that soon in one of five histories. The gate's row says
    which of the two it judges. Records from other machines or settings are left out and named. With -o gate.json,
    history.json and history.svg go beside it.

    In GitHub Actions every rule that did not pass annotates the run, and the table goes to the step's summary.

    Exit codes: 0 pass, 1 fail, 3 inconclusive or a parity.json alone in which no link had a limit, 5 not comparable.

    Example: corp-deploy gate bench.json parity.json --fail-if 'speedup@b8 < 1.2' --fail-if 'top1_agreement < 0.99'
    """
    from corp_deploy.formats.annotations import annotate_run
    from corp_deploy.formats.openmetrics import openmetrics_from_records
    from corp_deploy.formats.tracking import write_tracking
    from corp_deploy.proof import gate as judging
    from corp_deploy.views.parity import gate_shown
    from ground.files import write_text
    from perf.gate.gate import Gate
    from perf.gate.history import judge_history
    from perf.gate.rule import rule_from_text
    from perf.gate.verdicts import markdown_from_gate
    from perf.stats.releases import add_release

    for path in output:
        if path.suffix not in (".json", ".md", ".xml"):
            raise click.BadParameter(f"{path}: expected .json, .md or .xml", param_hint="--output")
    history, parsed = options.history, [rule_from_text(text) for text in options.rules]
    baseline.require(parsed)
    files = judging.sort_records(records)
    bench, parity = files.get("bench"), files.get("parity")
    if history is not None and any(path.resolve().parent == history.resolve() for path in output):
        raise click.UsageError(f"{history} keeps the bench records of releases: write verdict and trend elsewhere")
    for kind in baseline.by_kind if baseline.init else ():
        if kind not in files:
            option = "--baseline" if kind == "bench" else "--baseline-parity"
            raise click.UsageError(f"--init-baseline needs a {kind}.json among the records for {option}")
    if history is not None and bench is None:
        raise click.UsageError("--history keeps bench records: give a bench.json among the records")
    if not parsed and parity is None and history is None:
        raise click.UsageError(
            "nothing to judge: give a rule with --fail-if, a --history, or a parity.json, which has a verdict"
        )
    now = judging.read_evidence(bench, parity, options.confidence)
    rows = [] if parity is None else [judging.parity_row(parity, parsed)]
    older = baseline.older(files)
    before = judging.read_evidence(older.get("bench"), older.get("parity"))
    trend = None if history is None or bench is None else judging.read_trend(bench, history)
    rows += [] if trend is None else judge_history(trend)
    judged_by_rule = judging.judge_rows(judging.with_fitted_rule(parsed, now), now, before, starting=baseline.init)
    judged = Gate(rules=(*rows, *judged_by_rule), confidence=options.confidence if parsed else None)
    for path in output:
        judging.write_gate_file(judged, path)
    if options.track is not None:
        write_tracking(now, options.track)
    if options.metrics is not None:
        name, version = options.name, options.model_version
        text = openmetrics_from_records(now, judged, records[0].parent, name=name, version=version)
        write_text(options.metrics, text)
    if trend is not None:
        folder = next((path.parent for path in output if path.suffix == ".json"), None)
        if folder is not None:
            judging.write_trend(trend, folder)
        for left_out in trend.left_out:
            out.note(f"{history}: left out {left_out.name}: {left_out.reason}")
    if bench is not None and history is not None and add_release(history, bench, parity):
        out.note(f"{history}: {bench} is kept as release {len(trend.releases) if trend else 1}")
    for path, record in baseline.start(files, exit_code=judged.exit_code).items():
        out.note(f"{path}: {record} is the baseline now")
    for sentence in baseline.unwritten(files, judged):
        out.warn(sentence)
    result = {"verdict": judged.verdict, "exit_code": judged.exit_code, **asdict(judged)}
    out.result(result, *gate_shown(judged), f"gate {judged.verdict}")
    for line in annotate_run(judged, markdown_from_gate(judged), os.environ):
        click.echo(line, err=True)
    return judged.exit_code


@command()
@click.argument("directory", type=DIRECTORY, required=False)
@click.option(
    "--history",
    "kept",
    type=DIRECTORY,
    default=None,
    help="In place of DIRECTORY: the directory of releases that `gate --history` keeps; its releases are compared.",
)
@click.option(
    "--output",
    "-o",
    type=FILE,
    required=True,
    help="Report to write; its suffix chooses the format: .html, .md, .csv or .xml (JUnit); "
    "with --history .html or .md.",
)
@click.option("--title", default=None, help="Heading of the report; default: the directory's name.")
def report_command(directory: Path | None, kept: Path | None, output: Path, title: str | None, out: Output) -> None:
    """Write the report of a release, or of releases over time.

    The records are bench.json, parity.json, the records of the reduced model, and the effort records beside files.

    With --history the report has time, throughput, size and agreement of every release. At each change of a figure it
    names what differs from the release before: the driver, versions, settings, models and keys of the recipe. Each
    model, machine and precision has its own line of releases. The exit code is 0 whatever it shows: `gate --history`
    judges.

    Example: corp-deploy report release -o release/report.html

    Example: corp-deploy report --history history -o history.html
    """
    from corp_deploy.views.report_files import write_report

    write_report(directory, kept, output, title)
    out.result({"report": str(output)}, f"{output}: written")
