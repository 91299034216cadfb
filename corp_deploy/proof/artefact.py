"""An engine or a graph by itself: its origin, its ports and its runner, without a model to compare it with."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnxruntime

from corp_deploy.store.graph_facts import PREFIX, facts_of_onnx
from export.engine.record import record_of_plan
from export.graph.check import load_onnx
from export.graph.ports import noted_outputs, ports_of_graph
from ground.errors import BadInput, Missing
from ground.files import sha256_of_file
from ground.ports import LOGITS, OutputPort, Port
from perf.parity.labels import ComparedArtefact

from .candidates import Candidate, Run, candidate_from_path, fixed_ports

NOTE = f"{PREFIX}preprocessing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """An engine or a graph without its model.

    `batches` are the smallest and the largest batch size that it runs, None if it runs any. `preprocessing` is its
    graph's note on how images become its input. `movable` is true if other versions of its library may load it.
    """

    path: Path
    candidate: Candidate
    source: ComparedArtefact
    inputs: tuple[Port, ...]
    outputs: tuple[OutputPort, ...]
    batches: tuple[int, int] | None
    preprocessing: str | None
    movable: bool = True

    def sizes(self, requested: Sequence[int]) -> tuple[int, ...]:
        """Return the requested batch sizes that the artefact runs or, if it runs none of them, its largest size."""
        if self.batches is None:
            return tuple(requested)
        least, most = self.batches
        return tuple(size for size in requested if least <= size <= most) or (most,)

    @contextmanager
    def opened(self, elsewhere: str) -> Iterator[Run]:
        """Yield a function that runs the artefact; raise Missing with the advice `elsewhere` if it can't load here."""
        with ExitStack() as stack:
            try:
                run = stack.enter_context(self.candidate.opened(self.outputs))
            except (BadInput, Missing) as error:
                if self.candidate.form != "engine":
                    raise
                targets = ", ".join(self.source.targets) or "unknown"
                built = f"{self.source.backend} {self.source.version} for SM {targets}"
                raise Missing(
                    f"{self.path}: built by {built}, and it can't be run here: {error}\n{elsewhere}"
                ) from error
            yield run


def artefact_from_path(path: Path) -> Artefact:
    """Open a .plan with its record, or an .onnx file; raise BadInput for other files and inputs of variable size."""
    if path.suffix == ".plan":
        return _from_plan(path)
    if path.suffix == ".onnx":
        return _from_graph(path)
    raise BadInput(f"{path}: expected a .plan or an .onnx file; only these tell which graph an engine is of")


def _from_plan(path: Path) -> Artefact:
    record, candidate = record_of_plan(path), candidate_from_path(path)
    source = ComparedArtefact(
        label=f"{Path(path.parent.name) / path.name} {record.backend} {record.library_version} {record.precision}",
        backend=record.backend,
        version=record.library_version,
        targets=record.targets,
        precision=record.precision,
        graph_sha256=record.onnx_sha256,
        sha256=record.plan_sha256,
    )
    first, roles = record.batches[0], record.roles  # the profile that a runner takes
    return Artefact(
        path=path,
        candidate=candidate,
        source=source,
        inputs=fixed_ports(record.inputs, path),
        outputs=tuple(OutputPort(name=each.name, role=roles.get(each.name, LOGITS.role)) for each in record.outputs),
        batches=(first.smallest, first.largest),
        preprocessing=record.notes.get(NOTE),
        movable=record.options.get("version_compatible") is True,
    )


def _from_graph(path: Path) -> Artefact:
    candidate, proto, digest = candidate_from_path(path), load_onnx(path), sha256_of_file(path)
    precision = facts_of_onnx(path).precision
    source = ComparedArtefact(
        label=f"{Path(path.parent.name) / path.name} ONNX {precision}",
        backend="onnxruntime",
        version=onnxruntime.__version__,
        targets=(),
        precision=precision,
        graph_sha256=digest,
        sha256=digest,
    )
    return Artefact(
        path=path,
        candidate=candidate,
        source=source,
        inputs=fixed_ports(ports_of_graph(proto)[0], path),
        outputs=tuple(noted_outputs(proto)),
        batches=None if candidate.batch is None else (candidate.batch, candidate.batch),
        preprocessing=next((each.value for each in proto.metadata_props if each.key == NOTE), None),
    )
