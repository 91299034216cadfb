"""corp-deploy package, lint-repo and serve-version."""

from pathlib import Path

import click

from corp_deploy.views.console import Output
from ground.errors import EXIT_FAILED
from ground.quantities import MODEL_VERSION

from .numbers import Number
from .options import DIRECTORY, FILE, output_options
from .serving_choice import ServingChoice, serving_options


@click.command()
@click.argument("directory", type=DIRECTORY)
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Triton model repository, made or added to.")
@click.option("--name", default="vit", show_default=True, help="Model name; variants are NAME, NAME_onnx and NAME_cpu.")
@click.option(
    "--model-version", type=Number(MODEL_VERSION), default=1, show_default=True, help="Version directory to add."
)
@click.option("--labels", type=FILE, default=None, help="Class names, one a line.")
@click.option("--server", default=None, help="Server release such as 26.07, to warn when versions don't match.")
@serving_options
@output_options
def package(
    directory: Path,
    output: Path,
    name: str,
    model_version: int,
    labels: Path | None,
    server: str | None,
    serving: ServingChoice,
    out: Output,
) -> None:
    """Write a Triton model repository from a directory of results.

    Example: corp-deploy package release -o repository --name vit --model-version 1
    """
    from corp_deploy.release.serving import package_of_directory
    from export.triton.repository import write_repository

    packaged, notes = package_of_directory(
        directory,
        name=name,
        version=model_version,
        labels=labels,
        server=server,
        serving=serving.serving(),
        profiles=serving.batch,
    )
    written = write_repository(packaged, output)
    for note in (*notes, *written.warnings):
        out.warn(note)
    record = {"models": list(written.models), "warnings": [*notes, *written.warnings]}
    out.result(record, f"{output}: version {model_version} of {', '.join(written.models)}")


@click.command("lint-repo")
@click.argument("repository", type=DIRECTORY)
@click.option("--server", default=None, help="Server release such as 26.07, to compare versions with.")
@output_options
@click.pass_context
def lint_repo(ctx: click.Context, repository: Path, server: str | None, out: Output) -> None:
    """Check a Triton repository against its artefacts, without a server; exit 1 when one would not load.

    Example: corp-deploy lint-repo repository --server 26.07
    """
    from export.triton.lint import lint_repository

    findings = lint_repository(repository, server)
    rows = [
        {"severity": f.severity, "file": str(f.path), "line": f.line, "what": f.what, "remedy": f.remedy}
        for f in findings
    ]
    out.result({"findings": rows}, *(str(each) for each in findings), f"{repository}: {len(findings)} findings")
    if any(each.severity == "error" for each in findings):
        ctx.exit(EXIT_FAILED)


@click.command("serve-version")
@click.argument("repository", type=DIRECTORY)
@click.option("--name", default="vit", show_default=True, help="Model name.")
@click.option(
    "--model-version", type=Number(MODEL_VERSION), required=True, help="The version to serve, such as the last good."
)
@output_options
def serve_version(repository: Path, name: str, model_version: int, out: Output) -> None:
    """Roll back (or forward): have every variant of a model serve this version alone.

    Example: corp-deploy serve-version repository --name vit --model-version 1
    """
    from export.triton.versions import serve_version as serve

    changed = serve(repository, name, model_version)
    record = {"version": changed.version, "models": list(changed.models), "unchanged": list(changed.unchanged)}
    out.result(record, f"{repository}: {', '.join(changed.models)} serve version {changed.version}")
