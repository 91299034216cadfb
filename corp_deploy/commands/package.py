"""The commands package, package lint and package serve."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from corp_deploy.invocation import values
from corp_deploy.invocation.engine import ServingOptions
from corp_deploy.invocation.option import NEEDED, Record, option
from corp_deploy.invocation.option_support import spelled
from corp_deploy.invocation.values import TEXT
from corp_deploy.views.console import Output
from ground.errors import EXIT_FAILED, BadInput
from ground.quantity import ERROR, MODEL_VERSION, SECONDS

from .command import command, some
from .options import DIRECTORY, FILE, trust_engine_option
from .signing_choice import SigningChoice

if TYPE_CHECKING:
    from export.triton.versions import ServedVersion


@command(first="output name model-version labels server max-batch policy instances allow-failed sign")
@click.argument("directory", type=DIRECTORY)
@click.option("--output", "-o", type=DIRECTORY, required=True, help="Triton model repository, created or extended.")
def package_command(directory: Path, output: Path, options: ServingOptions, signing: SigningChoice, out: Output) -> int:
    """Write a Triton model repository from a directory of results.

    --sign signs the whole repository, with its older versions, under --name and --model-version, if `package lint`
    finds no error; `check OUTPUT --verify KEY.pub.pem` verifies it. Any later change, such as another version or
    `package serve`, invalidates the signature.

    Exit codes: 0 written, 1 refused, as parity.json or gate.json in DIRECTORY says FAIL; --allow-failed writes it.

    Example: corp-deploy package release -o repository --name vit --model-version 1
    """
    from corp_deploy.release.proven import proof_of_directory
    from corp_deploy.release.serving import package_of_directory, sign_repository, unsign_repository
    from export.triton.repository import write_repository

    signer = signing.signer()
    if signer is not None:
        signer.require()
    proof = proof_of_directory(directory)
    if proof.failed and not options.allow_failed:
        out.warn(proof.refusal(directory, "--allow-failed"))
        out.result({"models": [], "warnings": proof.failed, "signed": False})
        return EXIT_FAILED
    packaged, notes = package_of_directory(directory, proof, options)
    written = write_repository(packaged, output)
    if unsign_repository(output) and signer is None:
        out.warn(f"{output / 'model.sig'} is removed: it covered other files; sign with --sign")
    if signer is not None:
        sign_repository(output, options.name, str(options.model_version), signer)
    for note in (*notes, *written.warnings):
        out.warn(note)
    signed = "; signed: model.sig" if signer is not None else ""
    record = {"models": list(written.models), "warnings": [*notes, *written.warnings], "signed": signer is not None}
    out.result(record, f"{output}: version {options.model_version} of {', '.join(written.models)}{signed}")
    return 0


COMPARED = some("server", server="Server release such as 26.07, to compare versions with.")


@command("package lint")
@click.argument("repository", type=DIRECTORY)
@click.option("--output", "-o", type=FILE, help="SARIF file to write, for code scanning, such as lint.sarif.")
@trust_engine_option
def lint_repo(repository: Path, options: Annotated[ServingOptions, COMPARED], output: Path | None, out: Output) -> int:
    """Check a Triton repository without a server.

    Configs are compared with their artefacts; exit code 1 if one would not load. A package of AOTInductor (.pt2) that
    was not compiled on this machine is an error unless --trust-engine.

    Paths in SARIF are relative to the current directory, in CI the root of the checkout.

    Example: corp-deploy package lint repository --server 26.07 -o lint.sarif
    """
    from corp_deploy.proof.engine_trust import are_engines_trusted
    from export.triton.lint import lint_repository

    findings = lint_repository(repository, options.server, trust_packages=are_engines_trusted())
    rows = [
        {
            "severity": each.severity,
            "rule": each.rule,
            "file": str(each.path),
            "line": each.line,
            "what": each.what,
            "remedy": each.remedy,
        }
        for each in findings
    ]
    if output is not None:
        from corp_deploy.formats.sarif import sarif_from_findings
        from ground.files import write_text

        write_text(output, sarif_from_findings(findings, Path.cwd()))
    out.result({"findings": rows}, *(str(each) for each in findings), f"{repository}: {len(findings)} findings")
    return EXIT_FAILED if any(each.severity == "error" for each in findings) else 0


@dataclass(frozen=True, kw_only=True)
class RollOptions(Record):
    """The options of `package serve`: the model's version, and how it is tested in a running server."""

    name: str = option(TEXT, "vit", help="Model name.")
    model_version: int = option(MODEL_VERSION, NEEDED, help="The version to serve, such as the last one that worked.")
    server: str | None = option(
        TEXT, help="Also switch this running server, such as http://127.0.0.1:8000 (explicit mode)."
    )
    samples: Path | None = option(
        values.DIRECTORY,
        help="With --server: the release whose sample images test the new version before any client can use it.",
    )
    max_error: float = option(
        ERROR,
        0.05,
        help="With --samples: the largest relative error of its outputs, against the reduced model's in FP32.",
    )
    timeout: float = option(SECONDS, 120.0, help="With --server: seconds for each step.")

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        for name in ("samples", "max_error", "timeout"):
            if self.server is None and name in options:
                raise BadInput(f"{spelled(name)} is for a running server: give --server")
        if self.samples is None and "max_error" in options:
            raise BadInput("--max-error judges answers to samples: give --samples")


@command("package serve")
@click.argument("repository", type=DIRECTORY)
def serve_version_command(repository: Path, options: RollOptions, out: Output) -> int:
    """Make every variant of a model serve one version, older or newer.

    Without --server only the repository changes, and the server serves the version after its next load. With --server
    no request is dropped: the version is loaded and warmed up under a temporary name, tested on the samples, added
    beside the current one and switched to when ready; the old one is unloaded after its last request. If a step fails,
    the old version keeps serving. While a version loads or unloads, the whole server reports not ready
    (/v2/health/ready): traffic probes should ask /v2/models/NAME/ready.

    Exit codes: 0 served, 1 a step failed in the server.

    Example: corp-deploy package serve repository --name vit --model-version 1
    """
    from export.triton.versions import switch_version as serve

    server, version = options.server, options.model_version
    if server is None:
        changed = serve(repository, options.name, version)
        verb = "serves" if len(changed.models) == 1 else "serve"
        line = f"{repository}: {', '.join(changed.models)} {verb} version {changed.version}"
        out.result(asdict(changed), line, *_lines_of_unchanged(repository, changed))
        return 0
    from corp_deploy.release.check import samples_of_release
    from export.triton.rolling import roll
    from export.triton.server import TritonServer

    expected = None if options.samples is None else samples_of_release(options.samples, options.max_error)
    rolled = roll(repository, options.name, version, TritonServer(address=server, timeout_s=options.timeout), expected)
    served, errors, lines = rolled.served, rolled.errors, list[str]()
    for model in served.models:
        said = f"relative error on the samples {errors[model]:.1e}" if model in errors else "answers not compared"
        lines.append(f"{server}: {model} serves version {served.version}; {said}")
    for model in rolled.idle:
        lines.append(f"{repository}: {model} is not loaded there, its config names version {served.version}")
    lines += _lines_of_unchanged(repository, served)
    lines += [] if rolled.failure is None else [f"{server}: {rolled.failure}"]
    more = {"idle": list(rolled.idle), "sample_errors": dict(errors), "failure": rolled.failure}
    out.result(asdict(served) | more, *lines)
    return 0 if rolled.failure is None else EXIT_FAILED


def _lines_of_unchanged(repository: Path, served: "ServedVersion") -> list[str]:
    return [f"{repository}: {model} lacks version {served.version} and stays as it is" for model in served.unchanged]
