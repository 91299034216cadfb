"""Graphs of decoders on disk: the directories that export-decoder writes and onnxruntime-genai serves."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from corp_deploy.families.decoder_builder import (
    CLASSES,
    PROVIDERS,
    SETTINGS,
    WEIGHTS,
    build_graph,
    refuse_unbuilt,
    require_builder,
)
from corp_deploy.families.decoder_config import architecture_from_transformers
from corp_deploy.families.sentence_files import DECODER_FILES
from ground.errors import BadInput
from ground.files import path_inside, sha256_of_file
from ground.records import record_from_file
from ground.transaction import install_files
from perf.record.decoders import KvCache

from .hub_snapshot import CONFIG, config_of_transformers
from .transformers_directory import load_decoder
from .transformers_saved import directory_for

Size = Annotated[int, Meta(ge=1, le=10_000_000)]


class _Decoder(msgspec.Struct, frozen=True, kw_only=True):
    filename: str
    head_size: Size
    num_key_value_heads: Size
    num_hidden_layers: Annotated[int, Meta(ge=1, le=10_000)]


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    decoder: _Decoder
    context_length: Size
    vocab_size: Size
    type: str


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of genai_config.json that are read; its runtime reads the others."""

    model: _Model


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderGraph:
    """A graph with a key/value cache, the size of its vocabulary and the longest sequence that it takes."""

    path: Path
    cache: KvCache
    vocabulary: int
    longest: int

    @property
    def size_bytes(self) -> int:
        """The size of the graph and its weights on disk."""
        return sum(path.stat().st_size for path in self.path.parent.glob(f"{self.path.name}*") if path.is_file())


def _value_bytes(graph: Path) -> int:
    """Return the bytes of a number in the cache: 4 or 2. Raises BadInput for a graph without a cache."""
    from onnx import TensorProto

    from ground.onnx_file import read_onnx

    value_bytes = {TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2}
    for value in read_onnx(graph, weights=False).graph.input:
        kind = value.type.tensor_type.elem_type
        if value.name.startswith("past_key_values.") and kind in value_bytes:
            return value_bytes[kind]
    raise BadInput(f"{graph}: takes no cache in FP32 or FP16, expected a decoder's graph; write one by export-decoder")


def is_of_decoder(directory: Path) -> bool:
    """Return whether a directory has a decoder's graph, or a decoder of transformers that one can be built from."""
    plain = (directory / CONFIG).is_file() and config_of_transformers(directory).get("model_type") in CLASSES
    return plain or (directory / SETTINGS).is_file()


def graph_of_directory(directory: Path) -> DecoderGraph:
    """Return the graph in a directory. Raises BadInput for no or invalid settings, or a graph without a cache."""
    if not (directory / SETTINGS).is_file():
        raise BadInput(f"{directory}: no {SETTINGS} in it, expected a directory that export-decoder has written")
    model = record_from_file(directory / SETTINGS, _Settings, remedy="write it again by export-decoder").model
    graph = path_inside(directory, model.decoder.filename, where=str(directory / SETTINGS))
    decoder = model.decoder
    cache = _cache(decoder.num_hidden_layers, decoder.num_key_value_heads, decoder.head_size, _value_bytes(graph))
    return DecoderGraph(path=graph, cache=cache, vocabulary=model.vocab_size, longest=model.context_length)


def _cache(layers: int, groups: int, head: int, value_bytes: int) -> KvCache:
    sizes = {"layers": layers, "groups": groups, "head": head, "value_bytes": value_bytes}
    return msgspec.convert(sizes, KvCache)


def cache_of_directory(directory: Path, *, precision: str = "fp32") -> KvCache:
    """Return the cache sizes of the graph of a transformers directory. Raises BadInput for another directory."""
    built = architecture_from_transformers(config_of_transformers(directory), where=str(directory / CONFIG))
    return _cache(built.layers, built.groups, built.head, 2 if PROVIDERS[precision] == "cuda" else 4)


def export_decoder(directory: Path, output: Path, *, precision: str = "fp32") -> DecoderGraph:
    """Write and return the graph of a transformers directory; `output` gets all of its files or stays as it is.

    Raises BadInput for a directory that has no decoder, one that the builder can't build, or weights that don't fit,
    and Missing where the builder is not installed.
    """
    require_builder()
    config = config_of_transformers(directory)
    refuse_unbuilt(config, where=str(directory / CONFIG))
    if output.resolve() == directory.resolve():
        raise BadInput(f"{output}: holds the model itself; give another directory for its graph")
    built_of = architecture_from_transformers(config, where=str(directory / CONFIG))
    load_decoder(directory)  # refuses missing, unknown and pickled weights
    with directory_for(output), tempfile.TemporaryDirectory(dir=output, prefix=".building-") as scratch:
        built = Path(scratch) / "graph"
        build_graph(directory, built, precision=precision, window=built_of.window, scratch=Path(scratch) / "cache")
        moves = {path.name: path for path in sorted(built.iterdir())}
        stale = [name for name in (*DECODER_FILES, "tokenizer.json") if name not in moves and (output / name).is_file()]
        install_files(output, moves, removed=stale)
    return graph_of_directory(output)


def facts_of_graph(graph: DecoderGraph) -> Mapping[str, Any]:
    """Return a graph's path, digests, bytes, vocabulary and longest sequence, for records."""
    return {
        "path": str(graph.path),
        "sha256": sha256_of_file(graph.path),
        "weights_sha256": sha256_of_file(graph.path.with_name(WEIGHTS)),
        "size_bytes": graph.size_bytes,
        "vocabulary": graph.vocabulary,
        "longest": graph.longest,
    }
