"""A session of ONNX Runtime by the execution provider that was asked for, and no other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ground.errors import BadInput, Missing, is_out_of_memory

Provider = Literal["cpu", "cuda", "tensorrt"]
PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
# What it says of a graph that a provider doesn't take whole where the CPU may not have the rest.
LEFT_TO_CPU = "fallback to CPU EP has been explicitly disabled"


def onnxruntime_here() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise Missing("onnxruntime is not installed; install the extra `cpu` or `gpu`") from error
    return onnxruntime


def ort_errors(ort: Any) -> tuple[type[Exception], ...]:
    state = ort.capi.onnxruntime_pybind11_state
    return (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NotImplemented,
        state.RuntimeException,
    )


def require_provider(available: list[str], provider: Provider) -> None:
    """Raise Missing unless this build of ONNX Runtime has the provider."""
    name = PROVIDERS[provider]
    if name not in available:
        raise Missing(
            f"ONNX Runtime here has no {name}, only {', '.join(available)}: (a) install onnxruntime-gpu instead of "
            f"onnxruntime, (b) check the CUDA libraries, (c) measure with provider cpu"
        )


def require_granted(granted: list[str], provider: Provider) -> None:
    """Raise Missing when the session was given another provider than the one asked for."""
    if PROVIDERS[provider] not in granted:
        raise Missing(
            f"asked ONNX Runtime for {PROVIDERS[provider]} and got {', '.join(granted)}: its libraries failed to load; "
            f"check the driver and the CUDA, cuDNN and TensorRT versions that this onnxruntime-gpu was built for"
        )


def session_options(threads: int | None, *, log_severity: int = 3) -> Any:
    """With so many threads inside an operator, None for ONNX Runtime's choice."""
    options = onnxruntime_here().SessionOptions()
    options.log_severity_level = log_severity
    if threads is not None:
        options.intra_op_num_threads = threads
    # Threads that spin while they wait take the CPU from the other session of a comparison: with spinning, the same
    # digits graph at batch 8 took 3.9 or 7.3 ms by turns, without it 4.1 ms always.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def opened_session(path: Path, provider: Provider, options: Any, provider_options: Mapping[str, str]) -> Any:
    """Raises BadInput for a graph that can't be loaded, Missing where the provider doesn't take all of it."""
    ort = onnxruntime_here()
    try:
        # Its Python part would open the session again, or go on at a call, with another provider than asked for.
        session = ort.InferenceSession(
            str(path), options, providers=[(PROVIDERS[provider], dict(provider_options))], enable_fallback=0
        )
    except ort_errors(ort) as error:
        if is_out_of_memory(error):
            raise
        if LEFT_TO_CPU in str(error):
            raise Missing(
                f"{path}: asked ONNX Runtime for {PROVIDERS[provider]}, which leaves nodes of this graph to the CPU: "
                f"time it with provider cpu, or build an engine of it ({error!s:.300})"
            ) from error
        raise BadInput(f"{path}: ONNX Runtime cannot load it: {error}") from error
    require_granted(session.get_providers(), provider)
    return session
