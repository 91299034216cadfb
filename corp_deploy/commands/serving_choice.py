"""How a server is to run what `package` writes, as one value of its options."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from corp_deploy.invocation.values import ListOf
from ground.quantities import INSTANCES, QUEUE_DELAY_US, THREADS
from ground.quantity import BATCH

from .options import PROFILE, value_options
from .value import Value

if TYPE_CHECKING:
    from export.engine.options import BatchProfile
    from export.triton.config import Serving


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingChoice:
    """Beside what was measured. `batch` are the profiles of a plan that the build script is still to make."""

    queue_delay_us: int
    instances: int
    max_batch: int | None
    graph_batches: tuple[int, ...]
    policy: str
    cpu_backend: str
    cpu_threads: int | None
    batch: "tuple[BatchProfile, ...]"

    def serving(self) -> "Serving":
        """The same to the room of export; the batch to prefer is measured."""
        from export.triton.config import Serving

        return Serving(
            queue_delay_us=self.queue_delay_us,
            instances=self.instances,
            max_batch=self.max_batch,
            graph_batches=self.graph_batches,
            policy=self.policy,
            cpu_backend=self.cpu_backend,
            cpu_threads=self.cpu_threads,
        )


serving_options = value_options(
    "serving",
    ServingChoice,
    click.option(
        "--queue-delay-us",
        type=Value(QUEUE_DELAY_US),
        default=500,
        show_default=True,
        help="How long a request may wait for others to make a batch, in microseconds.",
    ),
    click.option(
        "--instances", type=Value(INSTANCES), default=1, show_default=True, help="Copies of each model that run."
    ),
    click.option(
        "--max-batch",
        type=Value(BATCH),
        default=None,
        help="Largest batch of graphs; a plan has its own. Default: the plan's, else 8 or the measured best batch.",
    ),
    click.option(
        "--graph-batches",
        type=Value(ListOf(BATCH, "1,8")),
        default=(),
        help="Batches for which the server captures CUDA graphs (plans only): those that were measured so.",
    ),
    click.option(
        "--policy",
        type=click.Choice(["latest", "all", "specific"]),
        default="latest",
        show_default=True,
        help="Versions to serve: the newest, every one, or the one that is written now.",
    ),
    click.option(
        "--cpu-backend",
        type=click.Choice(["python", "onnxruntime", "openvino"]),
        default="python",
        show_default=True,
        help="What runs the graph on the CPU: ONNX Runtime in the Python backend, or a backend of the server's own.",
    ),
    click.option("--cpu-threads", type=Value(THREADS), default=None, help="Threads of one operator on the CPU."),
    click.option(
        "--batch",
        type=PROFILE,
        multiple=True,
        help="A profile min:opt:max for the script that builds a missing plan; may be given several times.",
    ),
)
"""Adds the options and hands the command a `ServingChoice` as `serving`."""
