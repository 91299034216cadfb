"""Separate heads: graphs that compute score maps from a backbone's outputs, the same for every step of a chain."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from corp_deploy.invocation.option import PathLike
from ground.errors import BadInput
from ground.feeds import Feeds, Outputs, batch_size, checked_feeds, checked_outputs, feeds_of_ports
from ground.files import sha256_of_file
from ground.onnx_file import read_onnx
from ground.ports import OutputPort
from perf.parity.maps import THRESHOLD, SeparateHead
from perf.runners.onnx import OnnxRunner

from .candidates import Run, run_in_batches

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenHead:
    """A loaded head, the model's outputs that it reads, and its count of matrix products; its file names its maps."""

    path: Path
    runner: OnnxRunner
    reads: tuple[str, ...]
    products: int

    @property
    def maps(self) -> tuple[str, ...]:
        outputs, stem = self.runner.outputs, self.path.stem
        return (stem,) if len(outputs) == 1 else tuple(f"{stem} {port.name}" for port in outputs)

    def __call__(self, answers: Outputs, batch: int) -> Outputs:
        ports = self.runner.inputs
        feeds = feeds_of_ports({name: answers[name] for name in self.reads}, ports)
        checked = checked_feeds(feeds, ports, where=f"head {self.path}")

        def run(feeds: Feeds) -> Outputs:
            return checked_outputs(self.runner(feeds), batch_size(feeds), where=f"head {self.path}")

        own = run_in_batches(run, checked, self.runner.fixed_batch or batch)
        return {name: own[port.name] for name, port in zip(self.maps, self.runner.outputs, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofHeads:
    """The heads of a proof, and the value above which a pixel of a map with one class is positive."""

    every: tuple[OpenHead, ...] = ()
    threshold: float = THRESHOLD

    @property
    def ports(self) -> tuple[OutputPort, ...]:
        return tuple(OutputPort(name=name, role="score map") for head in self.every for name in head.maps)

    @property
    def records(self) -> tuple[SeparateHead, ...]:
        return tuple(
            SeparateHead(file=head.path.name, sha256=sha256_of_file(head.path), reads=head.reads, maps=head.maps)
            for head in self.every
        )

    def head_of(self, name: str) -> OpenHead:
        return next(head for head in self.every if name in head.maps)

    def behind(self, run: Run, batch: int) -> Run:
        """Return a function that runs a backbone and its heads; `batch` is for heads without a fixed batch size."""

        def whole(feeds: Feeds) -> Outputs:
            answers = run(feeds)
            return {**answers, **{name: rows for head in self.every for name, rows in head(answers, batch).items()}}

        return whole if self.every else run


@contextmanager
def open_heads(
    paths: Sequence[PathLike], outputs: Sequence[OutputPort], *, threshold: float = THRESHOLD
) -> Iterator[ProofHeads]:
    """Load the graphs of heads; pixels of a map with one class are positive above `threshold`.

    Raises BadInput if a head doesn't read the model's outputs, or a map has the name of another output.
    """
    with ExitStack() as stack:
        heads = ProofHeads(every=tuple(_opened(stack, Path(path), outputs) for path in paths), threshold=threshold)
        names = [port.name for port in (*outputs, *heads.ports)]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise BadInput(
                f"heads: two outputs are called {', '.join(twice)}; maps are named after the head's file: rename it"
            )
        yield heads


def _opened(stack: ExitStack, path: Path, outputs: Sequence[OutputPort]) -> OpenHead:
    runner = stack.enter_context(OnnxRunner(path))
    names, input_names = [port.name for port in outputs], [port.name for port in runner.inputs]
    # A single output feeds a single input under any name.
    reads = names if len(names) == len(input_names) == 1 else input_names
    if unknown := [name for name in reads if name not in names]:
        raise BadInput(
            f"head {path}: reads {', '.join(unknown)}, which the model does not give; it gives {', '.join(names)}: "
            "give the outputs that the head reads to --outputs, and name the head's inputs after them"
        )
    # The number of matrix products, which is at least that of the longest chain of them.
    products = sum(node.op_type in PRODUCTS for node in read_onnx(path, weights=False).graph.node)
    return OpenHead(path=path, runner=runner, reads=tuple(reads), products=products)
