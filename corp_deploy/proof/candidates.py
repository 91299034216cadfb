"""The candidates of a proof: model directories, graphs, packages and engines, each with its facts and its runner."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from calib.fingerprints_text import FingerprintsText
from corp_deploy.invocation.proof import Runtime
from corp_deploy.store.fitted import fitted_of_lineage
from corp_deploy.store.graph_facts import GraphFacts, facts_of_onnx, facts_of_package, port_of
from export.graph.package_notes import LARGEST_BATCH, SUFFIX, PackageNotes, notes_of_package
from export.graph.ports import GraphPort
from ground.errors import BadInput
from ground.feeds import (
    Feeds,
    Outputs,
    batch_size,
    checked_outputs,
    feeds_of_ports,
    fill_batch,
    iter_batches,
    select_rows,
)
from ground.ports import OutputPort, Port
from ground.precision import FLOAT16, FLOAT32, INT8, QUANTISED, FloatType, precision_by_name, type_by_name
from perf.parity.rounding import round_file
from perf.runners.engine import Backend, EngineRunner
from perf.runners.onnx import OnnxRunner
from perf.runners.onnx_session import Provider
from perf.runners.openvino import Arithmetic, OpenVinoRunner, import_openvino

from .engine_trust import record_of_trusted_plan, require_trusted_package
from .proof_inputs import feeds_for_ports, take_pixels

if TYPE_CHECKING:
    from corp_deploy.families.timm_images import ImageSpec
    from corp_deploy.store.checkpoint import Checkpoint
    from perf.runners.module import ModuleRunner
    from perf.runners.torch_package import PackageRunner

Run = Callable[[Feeds], Outputs]
FP32 = "fp32"
Form = Literal["torch", "graph", "package", "engine"]
ARITHMETIC: dict[Runtime, Arithmetic | None] = {"openvino": None, "openvino-fp16": "fp16", "openvino-bf16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One candidate with its label and name in the record, its form, and the number type that it rounds to.

    `batch` is a fixed batch size, None if any size runs. `shown` is the path in printed commands, if it differs. `rest`
    is the precision of the layers that a quantised graph doesn't quantise, if it is known, and `weight_bits` the bits
    of its weights. `sha256` is the digest that an engine's bytes must have. `runtime` runs a graph instead of ONNX
    Runtime; `provider` is an option of ONNX Runtime, and `as_typed` makes it compute the graph's types without its INT8
    kernels. `inputs` are the ports of a graph or an engine, `images` the preprocessing for one that takes pixels.
    `fitted` are the inputs that it was fitted to, if its file records them.
    """

    label: str
    name: str
    form: Form
    path: Path
    float_type: FloatType
    batch: int | None = None
    backend: str = ""
    sha256: str | None = None
    checkpoint: "Checkpoint | None" = None
    shown: Path | None = None
    rest: str | None = None
    weight_bits: int = 8
    runtime: Runtime | None = None
    provider: Provider = "cpu"
    as_typed: bool = False
    inputs: tuple[Port, ...] = ()
    images: "ImageSpec | None" = None
    fitted: FingerprintsText | None = None
    model_sha256: str | None = None

    @property
    def takes_pixels(self) -> bool:
        return take_pixels(self.inputs)

    @property
    def rounds(self) -> bool:
        """True if any of its layers computes in fewer bits than float32."""
        return self.float_type is not FLOAT32

    @property
    def quantised(self) -> bool:
        return self.float_type in QUANTISED.values()

    @property
    def _on_cpu(self) -> bool:
        return self.form == "graph" and self.runtime is None and self.provider == "cpu"

    @property
    def computes_int8(self) -> bool:
        """True if ONNX Runtime computes it with INT8 kernels of the CPU."""
        return self._on_cpu and self.float_type is INT8 and self.rest == FP32

    @property
    def emulated(self) -> bool:
        """True if it is computed in float32, with values rounded to the graph's types between operations."""
        return self._on_cpu and self.rounds and not self.computes_int8

    @contextmanager
    def opened(self, outputs: Sequence[OutputPort]) -> Iterator[Run]:
        """Yield a function that runs feeds of any number of inputs and names the results as `outputs` are named.

        Raises BadInput if the candidate has other outputs.
        """
        with tempfile.TemporaryDirectory() as scratch, self._runner(Path(scratch)) as runner:
            names = [port.name for port in runner.outputs]
            expected = [port.name for port in outputs]
            if len(names) != len(expected) or (len(names) > 1 and sorted(names) != sorted(expected)):
                raise BadInput(
                    f"{self.label}: gives {', '.join(names)}, expected {', '.join(expected)} as the dense model does"
                )

            def run(feeds: Feeds) -> Outputs:
                answers = runner(feeds_of_ports(self.fed(feeds, runner.inputs), runner.inputs))
                checked = checked_outputs(answers, batch_size(feeds), where=self.label)
                return (
                    {expected[0]: checked[names[0]]} if len(names) == 1 else {name: checked[name] for name in expected}
                )

            yield run if self.batch is None else lambda feeds: run_in_batches(run, feeds, self.batch or 1)

    def fed(self, feeds: Feeds, ports: Sequence[Port] = ()) -> Feeds:
        """Return feeds of the dense model in the form that this candidate takes."""
        return feeds_for_ports(feeds, ports or self.inputs, self.images, where=self.label)

    def _runner(self, scratch: Path) -> "ModuleRunner | PackageRunner | OnnxRunner | OpenVinoRunner | EngineRunner":
        if self.form == "torch":
            from corp_deploy.families.family import input_ports, output_ports
            from perf.runners.module import ModuleRunner

            assert self.checkpoint is not None, self.label
            model = self.checkpoint.model
            return ModuleRunner(model, inputs=input_ports(model), outputs=output_ports(model), label=self.label)
        if self.form == "package":
            return package_runner(self.path, notes_of_package(self.path))
        if self.form == "engine":
            backend: Backend = "tensorrt_rtx" if self.backend == "tensorrt-rtx" else "tensorrt"
            return EngineRunner(self.path, backend=backend, sha256=self.sha256)
        if self.runtime is not None:
            return OpenVinoRunner(self.path, arithmetic=ARITHMETIC[self.runtime])
        if not self.emulated:
            return OnnxRunner(self.path, provider=self.provider, as_typed=self.as_typed)
        # ONNX Runtime's CPU kernels compute FP16 in float32, where nothing overflows, and don't compute BF16 and FP8;
        # a rewritten graph rounds as its types say.
        rounded = scratch / "rounded.onnx"
        round_file(self.path, rounded)
        return OnnxRunner(rounded)


def run_in_batches(run: Run, feeds: Feeds, batch: int) -> Outputs:
    """Run all inputs at one batch size and concatenate the outputs; the last batch is filled up with repeats."""
    pieces = []
    for part in iter_batches(feeds, batch):
        count = batch_size(part)
        answers = run(part if count == batch else fill_batch(part, batch))
        pieces.append(select_rows(answers, slice(count)))
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _from_directory(path: Path, shown: Path) -> Candidate:
    from corp_deploy.store.dense_model import model_of_directory

    checkpoint = model_of_directory(path)
    return Candidate(
        label=f"{path.name} torch fp32",
        name=path.name,
        form="torch",
        path=path,
        shown=shown,
        float_type=FLOAT32,
        checkpoint=checkpoint,
        fitted=fitted_of_lineage(checkpoint.lineage, where=str(path)),
    )


def _from_engine(path: Path, shown: Path) -> Candidate:
    record = record_of_trusted_plan(path)
    return Candidate(
        label=f"{path.parent.name}/{path.name} {record.backend} {record.precision}",
        name=f"{path.parent.name}-{record.backend}-{record.precision}",
        form="engine",
        path=path,
        shown=shown,
        float_type=type_by_name(record.precision),
        backend=record.backend,
        sha256=record.plan_sha256,
        inputs=tuple(map(port_of, record.inputs)),
    )


def in_runtime(graph: Candidate, runtime: Runtime) -> Candidate:
    """Return a graph as a candidate that runs in OpenVINO, in the graph's own types or in the runtime's."""
    arithmetic = ARITHMETIC[runtime]
    lower = graph.float_type is FLOAT32 or (arithmetic == "bf16" and graph.float_type is FLOAT16)
    name = runtime if arithmetic is not None else "openvino"
    stem = graph.label.replace(" ONNX ", " OpenVINO ")
    return replace(
        graph,
        label=stem if arithmetic is None else f"{stem} in {arithmetic}",
        name=graph.name.replace("-onnx-", f"-{name}-"),
        float_type=precision_by_name(arithmetic).type if lower and arithmetic else graph.float_type,
        runtime=runtime,
    )


def with_runtimes(candidates: Sequence[Candidate], runtimes: Sequence[Runtime]) -> list[Candidate]:
    """Return the candidates, each graph followed by itself in these runtimes; raise BadInput if none is a graph."""
    if runtimes and not any(each.form == "graph" for each in candidates):
        raise BadInput(f"{', '.join(runtimes)} runs .onnx files, and there is none among the candidates; name one")
    if runtimes:
        import_openvino()
    chain: list[Candidate] = []
    for each in candidates:
        chain.append(each)
        if each.form == "graph":
            chain += [in_runtime(each, runtime) for runtime in dict.fromkeys(runtimes)]
    return chain


def candidate_from_path(shown: Path | str, *, below: Path = Path()) -> Candidate:
    """Open a directory, a graph, a package or an engine as a candidate; a relative path is one within `below`."""
    shown, path = Path(shown), below / shown
    if path.is_dir():
        return _from_directory(path, shown)
    if path.suffix == ".plan":
        return _from_engine(path, shown)
    if path.suffix == SUFFIX:
        require_trusted_package(path)
        return _from_facts(facts_of_package(path), path, shown, form="package", kind="AOTInductor")
    if path.suffix != ".onnx":
        raise BadInput(
            f"{path}: expected a directory written by corp-deploy, a snapshot of one of timm's repositories, an .onnx "
            "file, a .pt2 of `export --format aoti` or a .plan"
        )
    return _from_facts(facts_of_onnx(path), path, shown, form="graph", kind="ONNX")


def _from_facts(facts: GraphFacts, path: Path, shown: Path, *, form: Form, kind: str) -> Candidate:
    return Candidate(
        label=f"{path.parent.name}/{path.name} {kind} {facts.precision}",
        name=f"{path.parent.name}-{kind.lower()}-{facts.precision}",
        form=form,
        path=path,
        shown=shown,
        float_type=type_by_name(facts.precision),
        batch=facts.batch,
        rest=facts.rest,
        weight_bits=facts.weight_bits,
        inputs=facts.inputs,
        fitted=facts.fitted,
        model_sha256=facts.model_sha256,
    )


def package_runner(
    path: Path, notes: PackageNotes, *, threads: int | None = None, flush_l2: bool = False, label: str = ""
) -> "PackageRunner":
    """Return the runner of a package that is trusted."""
    from perf.runners.torch_package import PackageRunner

    return PackageRunner(
        path,
        inputs=tuple(map(port_of, notes.inputs)),
        outputs=tuple(OutputPort(name=port.name, role=notes.roles[port.name]) for port in notes.outputs),
        batch=str(notes.batch or f"any from 1 to {LARGEST_BATCH}"),
        precision=notes.precision,
        threads=threads,
        device=notes.device,
        flush_l2=flush_l2,
        label=label,
    )


def fixed_ports(values: Sequence[GraphPort], path: Path, *, remedy: str = "") -> tuple[Port, ...]:
    """Convert a graph's inputs to ports; raise BadInput if a size behind the batch axis is variable."""
    for value in values:
        if not all(isinstance(size, int) for size in value.shape[1:]):
            raise BadInput(
                f"{path}: its input {value.name} is {list(value.shape)}, expected [batch, ...] with fixed sizes behind "
                f"the batch{remedy}"
            )
    return tuple(map(port_of, values))


def with_preprocessing(candidates: Sequence[Candidate], dense: "Checkpoint") -> list[Candidate]:
    """Return the candidates with the dense model's preprocessing of images, by which feeds become pixels."""
    from .model_inputs import preprocessing_of

    images = preprocessing_of(dense)
    return [replace(each, images=images) for each in candidates]


def require_batches(candidates: Sequence[Candidate], batches: Sequence[int]) -> list[str]:
    """Return a sentence for each candidate whose fixed batch size prevents requested sizes from being run on it.

    Raises BadInput if a candidate's fixed batch size isn't requested, or a requested size runs on no candidate.
    """
    asked, sentences = ",".join(map(str, batches)), []
    for each in (candidate for candidate in candidates if candidate.batch):
        if each.batch not in batches:
            raise BadInput(
                f"{each.label}: its batch is fixed at {each.batch}, and --batch {asked} leaves that out; add "
                f"{each.batch}, or leave --batch out"
            )
        if others := [size for size in batches if size != each.batch]:
            left = " and ".join(map(str, others))
            sentences.append(f"{each.label}: its batch is fixed at {each.batch}; batch {left} is not run on it")
    if all(each.batch for each in candidates):
        fixed = {each.batch for each in candidates if each.batch}
        if missing := [size for size in batches if size not in fixed]:
            raise BadInput(
                f"--batch {asked}: no candidate runs at batch {missing[0]}, as every one is fixed at "
                f"{' or '.join(map(str, sorted(fixed)))}; leave {missing[0]} out, or export with the batch left free"
            )
    return sentences
