"""Options of engines and servers: of `build`, `audit`, `package` and `ship`. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from corp_deploy.spec.class_labels import LABELS_HELP
from export.engine.options import BatchProfile, BuildOptions
from ground.places import Place
from ground.precision import EVERY_WORD
from ground.quantity import BATCH, INSTANCES, MODEL_VERSION, OPTIMIZATION_LEVEL, QUEUE_DELAY_US, THREADS, WORKSPACE_MIB

from .option import NEEDED, PathLike, Record, option
from .table import AUDIT, BUILD, ENGINE_OPTIONS
from .values import DIRECTORY, FILE, PLACE, TEXT, ListOf, OneOf, ParsedText, Repeated

if TYPE_CHECKING:
    from export.triton.config import Serving


PROFILE = ParsedText(span="min:opt:max", expected="MIN:OPT:MAX", kind=BatchProfile, read=BatchProfile.from_text)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Record, heading="Engine"):
    """The options of `build`; None means the builder's default, and options that the builder ignores are refused."""

    backend: Literal["tensorrt", "tensorrt-rtx", "onnxruntime"] = option(
        default="tensorrt", help="What builds it; TensorRT-RTX and ONNX Runtime need no GPU."
    )
    batch: Sequence[BatchProfile] = option(
        Repeated(each=PROFILE),
        (),
        help=f"A profile min:opt:max, such as 1:8:64; may be given several times. {BUILD.help('batch')}",
    )
    sm: Sequence[str] = option(
        Repeated(),
        (),
        in_recipe="sms",
        help=f"A target such as 86; may be given several times; without it the plan is portable. {BUILD.help('sm')}",
    )
    precision: str | None = option(OneOf(EVERY_WORD), help="Refuse a graph of another precision.")
    timing_cache: PathLike | None = option(
        FILE, help=f"TensorRT's timing cache, read and updated. {BUILD.help('timing_cache')}"
    )
    optimization_level: int | None = option(
        OPTIMIZATION_LEVEL,
        help=f"The builder's optimization level; a higher one takes longer. {BUILD.help('optimization_level')}",
    )
    workspace_mib: int | None = option(
        WORKSPACE_MIB, help=f"Limit of the builder's workspace. {BUILD.help('workspace_mib')}"
    )
    version_compatible: bool = option(
        default=False, help=f"A plan that newer TensorRT versions load too. {BUILD.help('version_compatible')}"
    )
    compatibility: Literal["ampere-plus", "same-compute-capability", "portable", "targets"] | None = option(
        help="A plan that runs on more GPUs; a plan for each GPU alone is built too, to show the price. "
        f"{BUILD.help('compatibility')}",
    )
    sparse: bool = option(
        default=False, help=f"Use sparse kernels for 2:4 weights; refused if there are none. {BUILD.help('sparse')}"
    )
    device: Literal["cpu", "cuda"] = option(default="cpu", help=BUILD.help("device"))

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        way = f"{self.backend}-{self.device}" if self.backend == "onnxruntime" else self.backend
        BUILD.refuse([("", way)], options)

    def build_options(self, command: str) -> BuildOptions:
        """Return the options as BuildOptions; `command` is the command line that the engine's record names."""
        options = self.values | {"workspace_mib": self.workspace_mib and self.workspace_mib * 2**20}
        named = {ENGINE_OPTIONS.get(name, name): value for name, value in options.items() if name != "device"}
        return BuildOptions(**named, command=command)


@dataclass(frozen=True, kw_only=True)
class AuditOptions(Record):
    """The builder and the targets of the engines that `audit` counts attention kernels in."""

    backend: Literal["tensorrt", "tensorrt-rtx"] = option(
        default="tensorrt-rtx", help="What builds both; TensorRT-RTX needs no GPU."
    )
    sm: Sequence[str] = option(Repeated(), ("86",), help=f"Targets; may be given several times. {AUDIT.help('sm')}")

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        AUDIT.refuse([("", self.backend)], options)


@dataclass(frozen=True, kw_only=True)
class ServingOptions(Record, heading="Serving"):
    """The options of `package`: names, versions and class labels of the models, and how a server runs them."""

    name: str = option(TEXT, "vit", help="Model name; variants are NAME, NAME_onnx and NAME_cpu.")
    model_version: int = option(MODEL_VERSION, 1, help="Version directory to add.")
    labels: Path | None = option(FILE, help="Class names, one a line; default: those of the model's configuration.")
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
    allow_failed: bool = option(
        default=False, help="Pack a model whose parity or gate is FAIL; expected.json says that it failed."
    )

    @property
    def serving(self) -> "Serving":
        """The server's options, without names, labels and profiles; bench.json later adds the preferred batch size."""
        from export.triton.config import Serving

        others = ("name", "model_version", "labels", "server", "batch", "allow_failed")
        return Serving(**{name: value for name, value in self.values.items() if name not in others})


TargetName = Literal["onnxruntime-cpu", "onnxruntime-cuda", "openvino", "tensorrt", "tensorrt-rtx"]
MOST_HELD_OUT = 256


@dataclass(frozen=True, kw_only=True)
class ShipOptions(Record, heading="What is made"):
    """The images, labels, target and precisions of `ship`."""

    images: Place = option(
        PLACE,
        NEEDED,
        help="Unlabelled images like those the model will meet: a folder, tar shards, parquet files, a directory of "
        "datasets.save_to_disk, arrays, or a URL of any of these, as for calibrate.",
    )
    held_out: Place | None = option(
        PLACE,
        help=f"Other images that prove the result; default: half of --images, at most {MOST_HELD_OUT}, which nothing "
        "is fitted to.",
    )
    labels: Path | None = option(
        FILE, help=f"{LABELS_HELP} Of --held-out, or of all --images if there is no --held-out; adds accuracy."
    )
    target: TargetName | None = option(
        OneOf(get_args(TargetName)), unset="the fastest that is here", help="What the model is to run on."
    )
    precision: Sequence[str] = option(
        ListOf(OneOf(EVERY_WORD), "fp32,fp16"),
        ("fp32", "fp16"),
        help="Precisions of the graphs: a CPU runs the first, a GPU fp16 where it is among them.",
    )


@dataclass(frozen=True)
class ShipFiles(Record):
    """The directory that `ship` writes, a positional parameter in Python."""

    output: PathLike = option(DIRECTORY, NEEDED, help="Directory of the release, and of its recipe.toml.")
