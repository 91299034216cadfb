"""Options of `package`: how a server runs the models. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from export.engine.options import BatchProfile
from ground.quantity import BATCH, INSTANCES, MODEL_VERSION, QUEUE_DELAY_US, THREADS

from .engine import PROFILE
from .option import Record, option
from .values import FILE, TEXT, ListOf, Repeated

if TYPE_CHECKING:
    from export.triton.config import Serving


@dataclass(frozen=True, kw_only=True)
class ServingOptions(Record, heading="Serving"):
    """Beside what was measured: what is written, and how it is to be run."""

    name: str = option(TEXT, "vit", help="Model name; variants are NAME, NAME_onnx and NAME_cpu.")
    model_version: int = option(MODEL_VERSION, 1, help="Version directory to add.")
    labels: Path | None = option(FILE, help="Class names, one a line.")
    server: str | None = option(TEXT, help="Server release such as 26.07, to warn when versions don't match.")
    queue_delay_us: int = option(
        QUEUE_DELAY_US, 500, help="How long a request may wait for others to make a batch, in microseconds."
    )
    instances: int = option(INSTANCES, 1, help="Copies of each model that run.")
    max_batch: int | None = option(
        BATCH,
        help="Largest batch of graphs; a plan has its own. Default: the plan's, else 8 or the measured best batch.",
    )
    graph_batches: Sequence[int] = option(
        ListOf(BATCH, "1,8"),
        (),
        help="Batch sizes for which the server captures CUDA graphs (plans only); give those measured with CUDA "
        "graphs.",
    )
    policy: Literal["latest", "all", "specific"] = option(
        default="latest", help="Versions to serve: the newest, all, or the one that is written now."
    )
    cpu_backend: Literal["python", "onnxruntime", "openvino"] = option(
        default="python",
        help="What runs the graph on the CPU: ONNX Runtime in the Python backend, or a backend of the server's own.",
    )
    cpu_threads: int | None = option(THREADS, help="Threads of one operator on the CPU.")
    batch: Sequence[BatchProfile] = option(
        Repeated(each=PROFILE),
        (),
        help="A profile min:opt:max for the script that builds a missing plan; may be given several times.",
    )

    @property
    def serving(self) -> "Serving":
        """The same to the room of export; the batch to prefer is measured."""
        from export.triton.config import Serving

        others = ("name", "model_version", "labels", "server", "batch")
        return Serving(**{name: value for name, value in self.values.items() if name not in others})
