"""One build by the bindings of TensorRT or TensorRT-RTX, which share an object model and are passed as an argument.

Polygraphy isn't used: it chooses one library for the process, sends the log with RTX's kernels to a global logger, and
loses the node of a parser error.
"""

import importlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto

from export.graph.weights import module_of_node
from ground.errors import BadInput, Missing
from ground.files import regular_file, replacing
from ground.vulnerabilities import version_numbers

from .fusion import Kernel, kernels_from_inspector, kernels_from_log
from .messages import Messages, Progress, build_logger, build_monitor, parser_errors, prefix_sites
from .options import BatchProfile, BuildOptions
from .record import WITHOUT_WEIGHTS, EngineMemory, memory_from_log

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
# TensorRT 11 is recommended; 10.16.1, for servers that have 10, is the first of it with the published fixes.
# TensorRT-RTX builds portable engines without a GPU from 1.2 on.
_OLDEST = {"tensorrt": (10, 16, 1), "tensorrt-rtx": (1, 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Imported bindings; `module` is the module `tensorrt` or `tensorrt_rtx`, or a stand-in with the same names."""

    name: str
    version: str
    module: Any

    def __post_init__(self) -> None:
        assert self.name in _MODULES, self.name

    @property
    def is_rtx(self) -> bool:
        return self.name == "tensorrt-rtx"


def open_library(name: str, *, command: str = "") -> Library:
    """Import the bindings of `tensorrt` or `tensorrt-rtx`.

    Raises Missing, with the `command` to run elsewhere, when they are absent or too old.
    """
    try:
        module = importlib.import_module(_MODULES[name])
    except (ImportError, OSError) as error:
        raise Missing(missing_message(name, f"its Python package can't be loaded ({error})", command)) from error
    version = str(module.__version__)
    if version_numbers(version) < _OLDEST[name]:
        needed = ".".join(map(str, _OLDEST[name]))
        raise Missing(missing_message(name, f"version {needed} or newer is needed, {version} is installed", command))
    return Library(name=name, version=version, module=module)


def missing_message(backend: str, what: str, command: str, install: str = "") -> str:
    """Describe what is missing, how to install it, and the command to run on another machine."""
    message = f"{backend} can't build here: {what}\n  install: {install or f'pip install --upgrade {backend}'}"
    return f"{message}\n  or run on a machine that has it: {command}" if command else message


# 1.5.0.114 and 1.6.1.120 fail a type check in every INT8 convolution, for every GPU; 1.7.1.116 builds them.
_RTX_WITH_INT8_CONVOLUTIONS = (1, 7)


def convolution_remedies(library: Library, proto: ModelProto) -> list[str]:
    """Return advice about convolutions with INT8 weights if this version can't build them."""
    if not library.is_rtx or version_numbers(library.version) >= _RTX_WITH_INT8_CONVOLUTIONS:
        return []
    small = {tensor.name for tensor in proto.graph.initializer if tensor.data_type == TensorProto.INT8}
    nodes = proto.graph.node
    read = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear" and node.input[0] in small}
    modules = [module_of_node(node) for node in nodes if node.op_type == "Conv" and node.input[1] in read]
    if not modules:
        return []
    kept = " ".join(f"--keep-rest {module}" for module in modules) if len(modules) <= 3 else "--precision fp16"
    return [f"before 1.7 it builds no convolution in INT8: export with {kept}, or build with tensorrt-rtx 1.7"]


_NO_DRIVER = re.compile(r"CUDA driver|cudaError|no CUDA-capable device|CUDA initialization", re.IGNORECASE)
_NEEDS_GPU = "an NVIDIA GPU and its driver are needed"
_INSTALL_DRIVER = "the NVIDIA driver for this machine's GPU"


class Session:
    """One build, with detailed profiling verbosity, which adds no bytes to a plan and lists its kernels."""

    def __init__(self, onnx_path: Path, proto: ModelProto, choices: BuildOptions, library: Library) -> None:
        self.onnx_path, self.proto, self.choices, self.library = onnx_path, proto, choices, library
        self.trt: Any = library.module
        self.messages = Messages()
        self.logger = build_logger(self.trt, self.messages)
        self.cache_state = "none"

    def build(self, profiles: tuple[BatchProfile, ...], progress: Progress | None) -> bytes:
        trt = self.trt
        try:
            builder = trt.Builder(self.logger)
        except (TypeError, RuntimeError) as error:  # the bindings turn a null builder into TypeError
            raise self._no_gpu("; ".join(self.messages.errors) or str(error)) from error
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, self.logger)
        if not parser.parse_from_file(str(self.onnx_path)):
            raise BadInput(self._refusal("does not take this graph", parser_errors(parser) or self.messages.errors))
        config = self._config(builder, network, profiles)
        monitor = build_monitor(trt, self.messages, progress)
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
        if self.messages.stopped:
            raise KeyboardInterrupt
        if plan is None:
            errors = prefix_sites(self.messages.errors, {node.name for node in self.proto.graph.node})
            if any(_NO_DRIVER.search(error) for error in errors):
                raise self._no_gpu(errors[0])
            errors += convolution_remedies(self.library, self.proto)
            raise BadInput(self._refusal("could not build this graph", errors))
        if self.choices.timing_cache is not None:
            with replacing(self.choices.timing_cache) as beside:
                beside.write_bytes(bytes(config.get_timing_cache().serialize()))
        return bytes(plan)

    def inspected(self, plan: bytes, profiles: int) -> tuple[tuple[Kernel, ...], EngineMemory]:
        """Return a plan's kernels and memory: for TensorRT-RTX from the log, without a GPU, else from the engine."""
        logged = memory_from_log(self.messages.text, profiles)
        if self.library.is_rtx:
            return kernels_from_log(self.messages.text), logged
        runtime = self.trt.Runtime(self.logger)
        runtime.engine_host_code_allowed = self.choices.version_compatible
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise Missing(self._refusal("built a plan that it can't load again", self.messages.errors))
        inspector = engine.create_engine_inspector()
        kernels = kernels_from_inspector(inspector.get_engine_information(self.trt.LayerInformationFormat.JSON))
        sizes = tuple(int(engine.get_device_memory_size_for_profile_v2(index)) for index in range(profiles))
        unknown = WITHOUT_WEIGHTS if logged.weights_bytes is None else None
        return kernels, replace(logged, activations_bytes=sizes, reason=unknown)

    def _config(self, builder: Any, network: Any, profiles: tuple[BatchProfile, ...]) -> Any:
        trt, choices = self.trt, self.choices
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if choices.workspace_bytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, choices.workspace_bytes)
        if self.library.is_rtx:
            _set_targets(trt, config, choices.sms)
        else:
            self._set_tensorrt_only(config)
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        for batch in profiles:
            profile = builder.create_optimization_profile()
            sizes = (batch.smallest, batch.tuned, batch.largest)
            for tensor in inputs:
                profile.set_shape(tensor.name, *[(size, *tuple(tensor.shape)[1:]) for size in sizes])
            config.add_optimization_profile(profile)
        return config

    def _set_tensorrt_only(self, config: Any) -> None:
        trt, choices = self.trt, self.choices
        if choices.optimization_level is not None:
            config.builder_optimization_level = choices.optimization_level
        if choices.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if choices.compatibility is not None:
            config.hardware_compatibility_level = self._level(choices.compatibility)
        if choices.sparse:
            config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
        if choices.timing_cache is not None:
            stored = regular_file(choices.timing_cache).read_bytes() if choices.timing_cache.exists() else b""
            self.cache_state = "reused" if stored else "new"
            cache = config.create_timing_cache(stored)
            if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
                raise BadInput(
                    f"{choices.timing_cache}: not a timing cache of {self.library.name} {self.library.version} on this "
                    f"GPU ({'; '.join(self.messages.errors) or 'refused'}); name another file"
                )

    def _level(self, compatibility: str) -> Any:
        name, levels = compatibility.replace("-", "_").upper(), self.trt.HardwareCompatibilityLevel.__members__
        if name not in levels:
            raise BadInput(
                f"compatibility {compatibility}: {self.library.name} {self.library.version} knows only "
                f"{', '.join(levels)}; install a newer one"
            )
        return levels[name]

    def _no_gpu(self, reason: str) -> Missing:
        message = f"{_NEEDS_GPU} ({reason})"
        return Missing(missing_message(self.library.name, message, self.choices.command, _INSTALL_DRIVER))

    def _refusal(self, what: str, errors: list[str]) -> str:
        reasons = "\n".join(f"  {error}" for error in errors) or "  (it gave no reason)"
        return f"{self.onnx_path}: {self.library.name} {self.library.version} {what}:\n{reasons}"


def _set_targets(trt: Any, config: Any, sms: tuple[str, ...]) -> None:
    numbers = [sm for sm in sms if sm != "portable"]
    config.num_compute_capabilities = len(numbers)
    capabilities = trt.ComputeCapability.__members__
    for index, sm in enumerate(numbers):
        if f"SM{sm}" not in capabilities:
            raise BadInput(f"--sm {sm}: this TensorRT-RTX knows only {', '.join(capabilities)}; install a newer one")
        config.set_compute_capability(capabilities[f"SM{sm}"], index)
