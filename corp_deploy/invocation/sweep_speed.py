"""What trials of a sweep are timed in and built for, as it is asked for, and who honours which option. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ground.errors import BadInput

from .honours import ANY, Axis, Values, Way

Runtime = Literal["onnxruntime", "openvino", "torch", "engine"]
EngineBackend = Literal["tensorrt", "tensorrt-rtx"]
_TIMED: Mapping[str, Values] = dict.fromkeys(("batch", "time_limit", "half_width"), ANY)


def _way(words: str, ask: str, **honours: Values) -> Way:
    return Way(words=words, ask=ask, honours={**_TIMED, **honours})


BENCH = Axis(
    command="sweep",
    ways={
        "none": Way(words="a sweep that times nothing", ask="no --bench", honours={}),
        "built": Way(words="a sweep that builds engines", ask="--engine tensorrt-rtx", honours={"batch": ANY}),
        "onnxruntime": _way("ONNX Runtime", "--bench onnxruntime", threads=ANY, device=ANY, precision=("fp32", "fp16")),
        "openvino": _way("OpenVINO", "--bench openvino", threads=ANY, device=("cpu",), precision=ANY),
        "torch": _way("torch", "--bench torch", threads=ANY, device=ANY, precision=ANY),
        "engine": _way("engines", "--bench engine", device=("cuda",)),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpeedChoice:
    """`bench`: what times trials, None nothing; `engine`: what builds engines of them, None nothing.

    Raises BadInput for targets of no engine, and for engines to time that nothing builds.
    """

    bench: Runtime | None = None
    engine: EngineBackend | None = None
    sm: tuple[str, ...] = ()
    batch: tuple[int, ...] = (1, 16)
    precision: str = "fp32"
    threads: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    time_limit: float = 5.0
    half_width: float = 0.02

    def __post_init__(self) -> None:
        if self.bench == "engine" and self.engine is None:
            raise BadInput("--bench engine times engines; say what builds them: --engine tensorrt-rtx")
        if self.sm and self.engine is None:
            raise BadInput("--sm names targets of engines; give --engine tensorrt-rtx with it")

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        """Raise BadInput for one of these options that nothing here honours."""
        BENCH.refuse([("", self.bench or ("built" if self.engine else "none"))], options)
