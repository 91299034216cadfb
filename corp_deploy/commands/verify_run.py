"""What `verify` runs, and engines of one graph held against each other, in one environment or in two."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from corp_deploy.invocation.decoding import DecoderProof
from corp_deploy.invocation.option import option
from corp_deploy.invocation.proof import MetricOptions, ProofOptions
from corp_deploy.invocation.values import DIRECTORY, FILE
from corp_deploy.views.console import Output

from .options import explicit_options

if TYPE_CHECKING:
    from corp_deploy.proof.artefact import Artefact
    from corp_deploy.proof.compare_engines import Golden
    from corp_deploy.proof.custom_metrics import Meter
    from corp_deploy.proof.link_rules import ParityLimits
    from corp_deploy.proof.metric_request import MetricRequest
    from perf.parity.parity import Parity

    from .proof_input_choice import ProofInputChoice


@dataclass(frozen=True, kw_only=True)
class VerifyRun(MetricOptions, ProofOptions, DecoderProof, heading="Proof"):
    """What else is compared and kept. Of engines alone `write_golden` and `other_graph`; of models `polygraphy`."""

    output: Path | None = option(FILE, help="parity.json to write; per-image figures go to .npz beside it.")
    write_golden: Path | None = option(
        DIRECTORY,
        help="Save the inputs and the outputs of REFERENCE, a .plan or .onnx, for `verify DIR B.plan` elsewhere.",
    )
    other_graph: bool = option(
        default=False,
        help="Compare engines although they were built from different graphs; the record has both digests.",
    )
    polygraphy: Path | None = option(
        DIRECTORY,
        help="Also write inputs and golden answers of every graph as Polygraphy's JSON, with the commands that "
        "repeat the comparison there (extra interop). It loads no engines, since a plan may run host code.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.metrics

    @property
    def metrics(self) -> "tuple[MetricRequest, ...]":
        """Raises BadInput for what is none."""
        if not self.metric:
            return ()
        from corp_deploy.proof.metric_request import metrics_from_texts

        return metrics_from_texts(self.metric)

    def is_of_engines(self, reference: str) -> bool:
        """Whether the reference is an engine, a graph or golden answers, and no model."""
        return Path(reference).suffix in (".plan", ".onnx") or (Path(reference) / "golden.json").exists()

    def record_of(self, candidates: Sequence[Path]) -> Path:
        """Where it goes. Raises UsageError without it or without candidates, and for the name of the file beside it."""
        if not candidates:
            raise click.UsageError("Missing argument 'CANDIDATES...': what to hold against REFERENCE")
        if self.output is None:
            raise click.UsageError("Missing option '--output' / '-o'.")
        if self.output.suffix == ".npz":
            where = f"{self.output}: the per-image figures go there; expected .json"
            raise click.BadParameter(where, param_hint="--output")
        return self.output

    def compare(
        self,
        reference: Path,
        candidates: Sequence[Path],
        inputs: "ProofInputChoice",
        limits: "ParityLimits",
        out: Output,
    ) -> int:
        """Engines of one graph, or keep what the reference answers; the exit code."""
        from corp_deploy.proof.artefact import artefact_from_path
        from corp_deploy.proof.compare_engines import Commands, require_one_environment
        from corp_deploy.proof.metric_request import require_runnable

        if self.write_golden is not None:
            return self._keep(artefact_from_path(reference), self.write_golden, candidates, inputs, out)
        output = self.record_of(candidates)
        require_runnable(self.metrics)
        steps = [artefact_from_path(path) for path in candidates]
        if reference.is_dir():
            golden = self._golden(reference, inputs)
            elsewhere = "compare it in an environment that loads it, with the same golden directory"
        else:
            inputs.require()
            first = artefact_from_path(reference)
            elsewhere = Commands(inputs=inputs.describe, output=str(output)).elsewhere(reference, candidates)
            self._require_graph(first.source.graph_sha256, reference, steps)
            require_one_environment([first, *steps], elsewhere)
            golden = _answered(first, inputs, _sizes([first, *steps], self.batches), elsewhere)
        self._require_graph(golden.source.graph_sha256, reference, steps)
        meter = self._meter(golden)
        return _compared(golden, steps, output, _sizes(steps, self.batches), limits, elsewhere, meter, out)

    def _meter(self, golden: "Golden") -> "Meter":
        from corp_deploy.proof.custom_metrics import Meter
        from corp_deploy.proof.inputs import ProofInputs

        inputs = ProofInputs(feeds=golden.feeds, digest=golden.images.digest, names=golden.names)
        return Meter(self.metrics, inputs, time_limit_s=self.metric_time_limit)

    def _require_graph(self, digest: str, reference: Path, steps: "Sequence[Artefact]") -> None:
        from corp_deploy.proof.compare_engines import require_one_graph

        if not self.other_graph:
            require_one_graph(digest, str(reference), steps)

    def _golden(self, directory: Path, inputs: "ProofInputChoice") -> "Golden":
        from corp_deploy.proof.compare_engines import read_golden

        if inputs.way != "none":
            raise click.UsageError(f"{directory} holds the inputs that its answers are to; leave {inputs.describe} out")
        return read_golden(directory)

    def _keep(
        self,
        artefact: "Artefact",
        directory: Path,
        candidates: Sequence[Path],
        inputs: "ProofInputChoice",
        out: Output,
    ) -> int:
        from corp_deploy.proof.compare_engines import write_golden

        if candidates or self.output is not None or self.other_graph or self.metrics:
            raise click.UsageError(
                "--write-golden keeps what REFERENCE answers and compares nothing; leave candidates, --output, "
                "--other-graph and --metric out"
            )
        inputs.require()
        golden = _answered(artefact, inputs, _sizes([artefact], self.batches), None)
        write_golden(golden, directory)
        record = {"written": str(directory), "source": golden.source.line, "count": golden.images.count}
        then = f"then, where the other engine loads: corp-deploy verify {directory} B.plan -o parity.json"
        out.result(record, f"{directory}: {golden.images.count} inputs, {golden.source.line}", then)
        return 0


def _answered(
    artefact: "Artefact", inputs: "ProofInputChoice", batches: Sequence[int], elsewhere: str | None
) -> "Golden":
    from corp_deploy.proof.compare_engines import golden_of

    return golden_of(artefact, inputs.open_for_engine(artefact), batches, elsewhere=elsewhere)


def _compared(
    golden: "Golden",
    steps: "Sequence[Artefact]",
    output: Path,
    batches: Sequence[int],
    limits: "ParityLimits",
    elsewhere: str,
    meter: "Meter",
    out: Output,
) -> int:
    from corp_deploy.proof.compare_engines import compare
    from corp_deploy.proof.record import save_proof

    for sentence in limits.unreachable(golden.images):
        out.warn(sentence)
    with out.progress("verifying", len(steps), unit="engines") as bar:
        proof = compare(
            golden,
            steps,
            batches=batches,
            limits=limits,
            elsewhere=elsewhere,
            on_progress=bar,
            answered=meter.measure,
        )
    proof = meter.beside(proof)
    save_proof(proof, output)
    return tell_parity(proof.parity, out)


def tell_parity(parity: "Parity", out: Output, *more: str) -> int:
    """Say what came of a proof; the exit code."""
    from corp_deploy.proof.record import EXIT_CODES
    from corp_deploy.views.parity import located_lines, metric_lines, parity_table, reason_lines

    if parity.fitted is not None and parity.fitted.has_overlap:
        out.warn(parity.fitted.warning)
    if parity.verdict == "UNJUDGED":
        out.warn("nothing was judged: give --min-agreement or --max-error, or judge the record with gate --fail-if")
    lines = [*reason_lines(parity), *(source.line for source in parity.sources), *located_lines(parity)]
    out.result(parity.to_json(), parity_table(parity), *lines, *metric_lines(parity), *more, parity.line)
    return EXIT_CODES[parity.verdict]


def _sizes(artefacts: "Sequence[Artefact]", batches: Sequence[int]) -> Sequence[int]:
    """The batch sizes asked for. Raises UsageError where one that was typed is none that an engine takes."""
    for each in artefacts:
        if "batch" in explicit_options() and each.batches is not None:
            least, most = each.batches
            beyond = [size for size in batches if not least <= size <= most]
            if beyond:
                raise click.UsageError(
                    f"{each.path} takes batches of {least} to {most} only, --batch asks for {beyond[0]}; leave it out"
                )
    return batches
