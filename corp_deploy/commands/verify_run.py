"""The options and inputs of verify, for models, decoders and engines, and the comparison of engines of one graph."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corp_deploy.invocation.input_choice import InputOptions
from corp_deploy.invocation.option import option
from corp_deploy.invocation.proof import DecoderProof, MetricOptions, ProofFiles, ProofOptions
from corp_deploy.invocation.table import VERIFY
from corp_deploy.invocation.values import DIRECTORY
from corp_deploy.views.console import Output
from ground.errors import BadInput
from ground.quantity import BATCH

from .options import explicit_options

if TYPE_CHECKING:
    from corp_deploy.proof.artefact import Artefact
    from corp_deploy.proof.custom_metrics import MetricRequest
    from corp_deploy.proof.limits import ParityLimits
    from corp_deploy.proof.proof_inputs import ProofInputs
    from corp_deploy.store.checkpoint import Checkpoint
    from perf.parity.parity import Parity


@dataclass(frozen=True, kw_only=True)
class VerifyRun(ProofFiles, MetricOptions, ProofOptions, DecoderProof, heading="Proof"):
    """The options of a proof; `write_golden` and `other_graph` are for engines, `polygraphy` is for models."""

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
        """The metrics that --metric declares. Raises BadInput for a text that is not a metric."""
        if not self.metric:
            return ()
        from corp_deploy.proof.custom_metrics import metrics_from_texts

        return metrics_from_texts(self.metric)

    def record_of(self, candidates: Sequence[Path]) -> Path:
        """Return the path of the record to write; raise UsageError without --output or without candidates."""
        if not candidates:
            raise click.UsageError("Missing argument 'CANDIDATES...': models, graphs or engines to compare with it")
        if self.output is None:
            raise click.UsageError("Missing option '--output' / '-o'.")
        return Path(self.output)

    def compare(
        self,
        reference: Path,
        candidates: Sequence[Path],
        inputs: "ProofInputChoice",
        limits: "ParityLimits",
        out: Output,
    ) -> int:
        """Compare engines of one graph, or with --write-golden save the reference's outputs; return the exit code."""
        from corp_deploy.proof.artefact import artefact_from_path
        from corp_deploy.proof.compare_engines import (
            commands_for_two_environments,
            compare_engines,
            make_golden,
            read_golden,
            require_one_environment,
        )
        from corp_deploy.proof.custom_metrics import Meter, require_runnable
        from corp_deploy.proof.outcome import save_proof
        from corp_deploy.proof.proof_inputs import ProofInputs

        if self.write_golden is not None:
            return self._keep(artefact_from_path(reference), self.write_golden, candidates, inputs, out)
        output = self.record_of(candidates)
        require_runnable(self.metrics)
        steps = [artefact_from_path(path) for path in candidates]
        if reference.is_dir():
            if inputs.way != "none":
                what = f"{reference} has inputs of its own, together with their outputs"
                raise click.UsageError(f"{what}; leave {inputs.describe} out")
            golden = read_golden(reference)
            limits.require_applied(golden.outputs)
            elsewhere = "compare it in an environment that loads it, with the same golden directory"
            self._require_graph(golden.source.graph_sha256, reference, steps)
        else:
            inputs.require()
            first = artefact_from_path(reference)
            limits.require_applied(first.outputs)
            elsewhere = commands_for_two_environments(reference, candidates, inputs=inputs.describe, output=output)
            self._require_graph(first.source.graph_sha256, reference, steps)
            require_one_environment([first, *steps], elsewhere)
            golden = make_golden(
                first, inputs.open_for_engine(first), self._sizes([first, *steps]), elsewhere=elsewhere
            )
        for sentence in limits.unreachable(golden.images):
            out.warn(sentence)
        inputs_of_golden = ProofInputs(feeds=golden.feeds, digest=golden.images.digest, names=golden.names)
        meter = Meter(self.metrics, inputs_of_golden, time_limit_s=self.metric_time_limit)
        self._sizes(steps)
        with out.progress("verifying", len(steps), unit="engines") as bar:
            proof = compare_engines(
                golden, steps, limits=limits, elsewhere=elsewhere, on_progress=bar, answered=meter.measure
            )
        proof = meter.beside(proof)
        save_proof(proof, output)
        return show_proof(proof.parity, out)

    def _sizes(self, artefacts: "Sequence[Artefact]") -> Sequence[int]:
        """Return the batch sizes; raise UsageError for a size of --batch that an engine doesn't take."""
        for each in artefacts:
            if "batch" in explicit_options() and each.batches is not None:
                least, most = each.batches
                beyond = [size for size in self.batches if not least <= size <= most]
                if beyond:
                    takes = f"{each.path} takes batches of {least} to {most} only"
                    raise click.UsageError(f"{takes}, --batch asks for {beyond[0]}; leave it out")
        return self.batches

    def _require_graph(self, digest: str, reference: Path, steps: "Sequence[Artefact]") -> None:
        from corp_deploy.proof.compare_engines import require_one_graph

        if not self.other_graph:
            require_one_graph(digest, str(reference), steps)

    def _keep(
        self,
        artefact: "Artefact",
        directory: Path,
        candidates: Sequence[Path],
        inputs: "ProofInputChoice",
        out: Output,
    ) -> int:
        from corp_deploy.proof.compare_engines import make_golden, write_golden

        if candidates or self.output is not None or self.other_graph or self.metrics:
            raise click.UsageError(
                "--write-golden saves the outputs of REFERENCE and compares nothing; leave candidates, --output, "
                "--other-graph and --metric out"
            )
        inputs.require()
        golden = make_golden(artefact, inputs.open_for_engine(artefact), self._sizes([artefact]), elsewhere=None)
        write_golden(golden, directory)
        record = {"written": str(directory), "source": golden.source.line, "count": golden.images.count}
        then = f"then, where the other engine loads: corp-deploy verify {directory} B.plan -o parity.json"
        out.result(record, f"{directory}: {golden.images.count} inputs, {golden.source.line}", then)
        return 0


def show_proof(parity: "Parity", out: Output, *more: str) -> int:
    """Print the record of a proof with its warnings; return the exit code of its verdict."""
    from corp_deploy.proof.outcome import EXIT_CODES
    from corp_deploy.views.parity import parity_shown
    from perf.parity.parity import HOW_TO_JUDGE

    if parity.fitted is not None and parity.fitted.has_overlap:
        out.warn(parity.fitted.warning)
    if parity.verdict == "UNJUDGED":
        left = " and ".join(parity.unjudged) or "any output"
        out.warn(f"no limit judged {left}: {HOW_TO_JUDGE}, or judge the record with gate --fail-if")
    for sentence in parity.warnings:
        out.warn(sentence)
    out.result(parity.to_json(), *parity_shown(parity), *more, parity.line)
    return EXIT_CODES[parity.verdict]


NO_INPUTS = "give --images, --text or --arrays, or --random when random inputs are really meant"


@dataclass(frozen=True, kw_only=True)
class ProofInputChoice(InputOptions):
    """The path of real inputs, of which `seed` draws `samples`, or the number of random inputs, drawn by `seed`."""

    random: int | None = option(BATCH, help="Compare on this many random inputs; the record says so.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None and self.random is not None:
            raise BadInput(NO_INPUTS)

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        super().refuse_ignored(options)
        VERIFY.refuse([("", self.way)], options)

    @property
    def way(self) -> str:
        if self.random is not None:
            return "random"
        return "none" if self.path is None else "images"

    @property
    def describe(self) -> str:
        return super().describe if self.random is None else f"--random {self.random} --seed {self.seed}"

    def require(self) -> None:
        """Raise BadInput if there are neither real nor random inputs."""
        if self.way == "none":
            raise BadInput(NO_INPUTS)

    def open_for_engine(self, artefact: "Artefact") -> "ProofInputs":
        """Return the inputs as an engine takes them; raise BadInput for texts, and for images that can't be prepared.

        An engine without a record of its preprocessing takes preprocessed arrays only.
        """
        from corp_deploy.proof.port_images import images_of_port
        from corp_deploy.proof.proof_inputs import draw_noise

        if self.random is not None:
            return draw_noise(artefact.inputs, self.random, self.seed)
        if self.arrays is not None:
            from calib.rows import open_arrays
            from corp_deploy.proof.model_inputs import inputs_from_set

            return inputs_from_set(open_arrays(self.arrays, artefact.inputs, id_counts={}, **self.drawn))
        if self.images is None or len(artefact.inputs) > 1:
            raise BadInput(
                f"{artefact.path}: an engine is compared on --images, --arrays or --random; its tokenizer isn't here"
            )
        (port,), where = artefact.inputs, str(artefact.path)
        return images_of_port(port, artefact.preprocessing, self.images, where=where, **self.drawn)

    def of_model(self, dense: "Checkpoint", note: Callable[[str], None], *, pixels: bool = False) -> "ProofInputs":
        """Return the inputs as a model takes them; with `pixels` random ones are uint8 pixels."""
        from corp_deploy.proof.model_inputs import draw_random_inputs, inputs_from_set

        if self.random is not None:
            return draw_random_inputs(dense, self.random, self.seed, pixels=pixels)
        source = self.proving(self.open(dense, note), self.seed)
        return inputs_from_set(source, self.class_indices(source, dense, note))
