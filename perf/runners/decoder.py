"""Runner of a decoder's ONNX graph with its key/value cache in ONNX Runtime, by whole prompts or token by token.

Inputs are input_ids [B,T], attention_mask [B,P+T] and past_key_values.* [B,G,P,H]; outputs are logits [B,T,V] and
present.*. Past and present share one buffer. Shapes: B sequences, T fed tokens, P cached tokens, N tokens in all,
G groups of heads, H dimensions of a head, V words.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput, is_out_of_memory
from ground.feeds import Feeds, Outputs, checked_feeds
from ground.onnx_file import read_onnx
from ground.ports import OutputPort, Port
from perf.record.decoders import KvCache
from perf.record.runs import Flat

from .onnx import onnx_precision
from .onnx_session import (
    PROVIDERS,
    Provider,
    import_onnxruntime,
    open_session,
    ort_errors,
    require_provider,
    session_options,
)
from .protocol import HostBound, MemoryGauge, device_gauge, resident_gauge

IDS, MASK, LOGITS = "input_ids", "attention_mask", "logits"
_PAST, _PRESENT = "past_key_values.", "present."
_TYPES = {4: "tensor(float)", 2: "tensor(float16)"}


@dataclass(slots=True)
class DecoderRunner:
    """A decoder on sequences of `length` tokens, which returns the logits of the tokens after the first `cached` ones.

    Timed calls start with those tokens in the cache. Provider `cuda` runs only graphs in FP16.
    """

    path: Path
    cache: KvCache
    length: int
    cached: int = 0
    provider: Provider = "cpu"
    threads: int | None = None
    _session: Any = field(default=None, init=False, repr=False)
    _describe: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.cached < self.length:
            raise BadInput(f"tokens: at least 1 after the cached ones, got {self.length} with {self.cached} cached")
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"threads: at least 1, got {self.threads}")
        if self.provider == "cuda" and self.cache.value_bytes != 2:
            raise BadInput(
                f"{self.path}: its cache is not in FP16, and provider cuda has attention only in FP16; "
                "export-decoder --precision fp16 writes a graph for it"
            )

    @property
    def inputs(self) -> tuple[Port, ...]:
        return (Port(name=IDS, shape=(self.length,), dtype="int64"),)

    @property
    def outputs(self) -> tuple[OutputPort, ...]:
        return (OutputPort(name=LOGITS, role="token logits"),)

    def __enter__(self) -> Self:
        ort = import_onnxruntime()
        require_provider(ort.get_available_providers(), self.provider)
        precision = _graph_precision(self.path)
        options = session_options(self.threads, log_severity=4)  # errors are raised anyway
        self._session = open_session(self.path, self.provider, options, {})
        self._require_decoder()
        self._describe = {
            "backend": "onnxruntime",
            "version": ort.__version__,
            "device": self.provider,
            "provider": PROVIDERS[self.provider],
            "precision": precision,
            "mode": "session, cache shared",
            "length": self.length,
            "cached": self.cached,
            "threads": options.intra_op_num_threads or None,
            "spinning": False,
            "clock": "host",
            "model": self.path.name,
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None

    def __call__(self, feeds: Feeds) -> Outputs:
        bound = self.bind(feeds)
        return bound.outputs(bound.call())

    def steps(self, feeds: Feeds) -> Outputs:
        """Return the logits [B,N,V] of all tokens, fed one by one, starting with an empty cache."""
        ids_BN = self._checked_ids(feeds)
        cache = self._buffers(len(ids_BN))
        places = range(self.length)
        each = [
            self._run_binding(self._prepare_binding(ids_BN[:, place : place + 1], place, cache)) for place in places
        ]
        return {LOGITS: np.concatenate(each, axis=1)}

    def bind(self, feeds: Feeds) -> HostBound:
        ids_BN = self._checked_ids(feeds)
        cache = self._buffers(len(ids_BN))
        if self.cached:
            self._run_binding(self._prepare_binding(ids_BN[:, : self.cached], 0, cache))
        binding = self._prepare_binding(ids_BN[:, self.cached :], self.cached, cache)
        session = self._session

        def call() -> Any:
            session.run_with_iobinding(binding)
            return binding

        self._run_binding(binding)  # raises BadInput here rather than in a timed call
        return HostBound(call, outputs=lambda bound: {LOGITS: _logits(bound)})

    def gauge(self) -> MemoryGauge | None:
        return resident_gauge() if self.provider == "cpu" else device_gauge()

    def describe(self) -> Flat:
        return dict(self._describe)

    def _checked_ids(self, feeds: Feeds) -> NDArray[np.int64]:
        ids: NDArray[np.int64] = checked_feeds(feeds, self.inputs, where=str(self.path), batch=None)[IDS]
        return ids

    @property
    def _past(self) -> list[str]:
        return [f"{_PAST}{layer}.{part}" for layer in range(self.cache.layers) for part in ("key", "value")]

    def _require_decoder(self) -> None:
        """Raise BadInput for a graph that is no decoder or has another cache."""
        inputs = {node.name: node for node in self._session.get_inputs()}
        outputs = {node.name for node in self._session.get_outputs()}
        expected_outputs = {LOGITS, *(name.replace(_PAST, _PRESENT) for name in self._past)}
        if inputs.keys() != {IDS, MASK, *self._past} or outputs != expected_outputs:
            raise BadInput(
                f"{self.path}: takes {', '.join(list(inputs)[:4])}, expected a decoder's graph of {self.cache.layers} "
                f"layers: {IDS}, {MASK} and {_PAST}*, to {LOGITS} and {_PRESENT}*; write one by export-decoder"
            )
        part = inputs[self._past[0]]
        if part.type != _TYPES[self.cache.value_bytes] or part.shape[1] != self.cache.groups:
            raise BadInput(
                f"{self.path}: its cache is {part.type} {part.shape}, and its settings say {self.cache.groups} groups "
                f"of {8 * self.cache.value_bytes} bits; write it again by export-decoder"
            )

    def _buffers(self, batch: int) -> dict[str, Any]:
        value: Any = import_onnxruntime().OrtValue
        shape = batch, self.cache.groups, self.length, self.cache.head
        kind = np.float32 if self.cache.value_bytes == 4 else np.float16
        return {name: value.ortvalue_from_numpy(np.zeros(shape, kind), self.provider, 0) for name in self._past}

    def _prepare_binding(self, ids_BT: NDArray[np.int64], past: int, cache: Mapping[str, Any]) -> Any:
        binding, (batch, count) = self._session.io_binding(), ids_BT.shape
        binding.bind_cpu_input(IDS, np.ascontiguousarray(ids_BT))
        binding.bind_cpu_input(MASK, np.ones((batch, past + count), np.int64))
        for name, buffer in cache.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace(_PAST, _PRESENT), buffer)
        binding.bind_output(LOGITS, self.provider)
        return binding

    def _run_binding(self, binding: Any) -> NDArray[np.float32]:
        # With buffers bound, ONNX Runtime may also raise a bare RuntimeError.
        failures: tuple[type[Exception], ...] = (RuntimeError, *ort_errors(import_onnxruntime()))
        try:
            self._session.run_with_iobinding(binding)
        except failures as error:
            if is_out_of_memory(error):
                raise
            raise BadInput(
                f"{self.path}: {PROVIDERS[self.provider]} cannot run it ({error!s:.300}); a graph in fp16 is for "
                "provider cuda, others are for cpu"
            ) from error
        return _logits(binding)


def _logits(binding: Any) -> NDArray[np.float32]:
    """Return the logits, the output that was bound last."""
    return np.asarray(binding.get_outputs()[-1].numpy(), dtype=np.float32)


def _graph_precision(path: Path) -> str:
    bits = [
        attribute.i
        for node in read_onnx(path, weights=False).graph.node
        if node.op_type == "MatMulNBits"
        for attribute in node.attribute
        if attribute.name == "bits"
    ]
    return f"int{min(bits)}" if bits else onnx_precision(path)
