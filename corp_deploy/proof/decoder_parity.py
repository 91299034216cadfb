"""Decoders' graphs proved. One against transformers on the same directory: prefill, and one token after the other with
the cache. Two side by side: prefill by length, and a step of decoding by batch, as perf times any two.

Shapes: B sequences, N tokens of each, V words.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from corp_deploy.families.decoder_builder import SETTINGS, open_reference
from corp_deploy.invocation.decoding import DecoderLoad
from corp_deploy.store.decoder_graph import DecoderGraph, export_decoder, facts_of_graph, graph_of_directory
from corp_deploy.store.transformers_directory import decoder_arguments
from ground.errors import BadInput
from ground.files import sha256_of_file, write_json
from perf.bench.bench import Subject, bench
from perf.parity.measures import measures
from perf.record.decoders import DecoderBench, Prefill
from perf.record.runs import Bench, Flat
from perf.runners.cuda import first_uuid
from perf.runners.decoder import IDS, LOGITS, DecoderRunner
from perf.runners.onnx_session import Provider
from perf.timing.laps import Plan
from perf.timing.watch import environment, watching

KIND, VERSION = "decoder-parity", 1
MOST_ERROR = 1e-4
"""Of a graph in FP32, which computes what transformers does in another order."""
Status = Literal["PASS", "FAIL", "MEASURED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One way of running both; `bound` of the relative error, None where nothing bounds it."""

    name: str
    measures: Mapping[str, Any]
    bound: float | None

    @property
    def status(self) -> Status:
        if self.bound is None:
            return "MEASURED"
        finite = self.measures["nonfinite_images"] == 0
        return "PASS" if finite and self.measures["relative_error"] <= self.bound else "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParity:
    """What was found on `sequences` of `length` tokens."""

    model: str
    graph: Mapping[str, Any]
    runtime: Flat
    sequences: int
    length: int
    links: tuple[Link, ...]

    @property
    def passed(self) -> bool:
        return all(link.status != "FAIL" for link in self.links)

    def as_json(self) -> dict[str, Any]:
        links = [{**asdict(link), "status": link.status} for link in self.links]
        return {"kind": KIND, "version": VERSION, **asdict(self), "links": links}


def drawn_ids(vocabulary: int, *, sequences: int, length: int, seed: int) -> NDArray[np.int64]:
    """Any tokens, [B,N]."""
    return np.random.default_rng(seed).integers(0, vocabulary, (sequences, length), dtype=np.int64)


def verify_decoder(
    directory: Path,
    graph: DecoderGraph,
    ids_BN: NDArray[np.int64],
    *,
    provider: Provider = "cpu",
    max_error: float | None = None,
) -> DecoderParity:
    """Run both on these tokens.

    Args:
        directory: the plain directory that the graph was built of.
        max_error: of the logits, relative; None bounds a graph in FP32 by MOST_ERROR and no other.

    Raises:
        BadInput: a directory that is no decoder, another model's graph, or more tokens than it can place.
        Missing: transformers, ONNX Runtime or the provider is absent.
    """
    _, arguments = decoder_arguments(directory, {})
    of_model = arguments.decoder
    _require_alike(directory, graph, of_model.vocabulary, (of_model.layers, of_model.groups, of_model.head))
    length = ids_BN.shape[1]
    if length > min(graph.longest, of_model.longest):
        raise BadInput(f"{length} tokens, and {directory} places {of_model.longest} at most; give a smaller --length")
    reference = open_reference(directory)
    runner = DecoderRunner(graph.path, graph.cache, length, provider=provider)
    with runner:
        exact = runner.describe()["precision"] == "fp32"
        bound = MOST_ERROR if max_error is None and exact else max_error
        feeds = {IDS: ids_BN}
        links = (
            _link("prefill", reference.prefill(ids_BN), runner(feeds)[LOGITS], bound),
            _link("token by token", reference.steps(ids_BN), runner.steps(feeds)[LOGITS], bound),
        )
        runtime = runner.describe()
    return DecoderParity(
        model=str(directory),
        graph=facts_of_graph(graph),
        runtime=runtime,
        sequences=len(ids_BN),
        length=length,
        links=links,
    )


def save_decoder_parity(parity: DecoderParity, path: Path) -> None:
    """Write the record as JSON, whole or not at all."""
    write_json(path, parity.as_json())


def _link(name: str, expected: NDArray[np.float32], actual: NDArray[np.float32], bound: float | None) -> Link:
    found = asdict(measures(expected, actual, role="token logits"))
    return Link(name=name, measures={key: _number(value) for key, value in found.items()}, bound=bound)


def _number(value: Any) -> Any:
    """A figure that is not finite is null in a record."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _require_alike(directory: Path, graph: DecoderGraph, vocabulary: int, of_model: tuple[int, int, int]) -> None:
    of_graph = graph.cache.layers, graph.cache.groups, graph.cache.head
    if (graph.vocabulary, of_graph) != (vocabulary, of_model):
        raise BadInput(
            f"{graph.path}: of {graph.vocabulary} words and layers, groups and head {list(of_graph)}, and {directory} "
            f"has {vocabulary} and {list(of_model)}; give the directory that the graph was built of"
        )


NAMES = ("dense", "reduced")
Progress = Callable[[float, str], None]


def measure_decoders(
    dense: Path,
    reduced: Path,
    load: DecoderLoad,
    plan: Plan,
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> DecoderBench:
    """Time two directories that export-decoder has written, or plain ones, which are exported to FP32 first.

    The plan's time is that of each length and each batch size, and what exporting takes is part of it.

    Raises:
        BadInput: directories that are neither, decoders of different words, or more tokens than one of them can place.
        Missing: a package, the provider or a device is absent.
    """
    began_s = perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        graphs = [_graph(path, Path(scratch) / name) for name, path in zip(NAMES, (dense, reduced), strict=True)]
        _require_comparable(graphs, load)
        every = [(length, 0, (1,)) for length in load.lengths] + [(load.cached + 1, load.cached, load.batches)]
        benches, made_s = [], (perf_counter() - began_s) / (len(load.lengths) + len(load.batches))
        for index, (length, cached, batches) in enumerate(every):
            say = None if progress is None else partial(_within, progress, index, len(every))
            benches.append(_timed(graphs, length, cached, batches, load, plan, command, say, made_s))
    *prefill, decode = benches
    return DecoderBench(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=tuple(command),
        caches={name: graph.cache for name, graph in zip(NAMES, graphs, strict=True)},
        prefill=tuple(Prefill(length=length, bench=each) for length, each in zip(load.lengths, prefill, strict=True)),
        cached=load.cached,
        decode=decode,
        warnings=tuple(
            f"{_words(length, cached)}: {warning}"
            for (length, cached, _), each in zip(every, benches, strict=True)
            for warning in each.warnings
        ),
    )


def _words(length: int, cached: int) -> str:
    return f"decoding behind {cached} tokens" if cached else f"prefill of {length} tokens"


def _within(progress: Progress, index: int, count: int, share: float, text: str) -> None:
    progress((index + share) / count, text)


def _graph(directory: Path, scratch: Path) -> DecoderGraph:
    return graph_of_directory(directory if (directory / SETTINGS).is_file() else _exported(directory, scratch))


def _exported(directory: Path, scratch: Path) -> Path:
    export_decoder(directory, scratch)
    return scratch


def _require_comparable(graphs: Sequence[DecoderGraph], load: DecoderLoad) -> None:
    dense, reduced = graphs
    if dense.vocabulary != reduced.vocabulary:
        raise BadInput(
            f"{dense.path} knows {dense.vocabulary} words, {reduced.path} {reduced.vocabulary}: not one task"
        )
    for graph in graphs:
        DecoderRunner(graph.path, graph.cache, load.longest, provider=load.provider)  # refuses what it can't be run by
        if load.longest > graph.longest:
            raise BadInput(
                f"{graph.path}: places {graph.longest} tokens, and {load.longest} are asked for; give smaller --length "
                "and --cached"
            )


def _subject(name: str, graph: DecoderGraph, length: int, cached: int, load: DecoderLoad) -> Subject:
    opened = partial(
        DecoderRunner, graph.path, graph.cache, length, cached=cached, provider=load.provider, threads=load.threads
    )
    return Subject(name=name, open=opened, size_bytes=graph.size_bytes, sha256=sha256_of_file(graph.path))


def _timed(
    graphs: Sequence[DecoderGraph],
    length: int,
    cached: int,
    batches: Sequence[int],
    load: DecoderLoad,
    plan: Plan,
    command: Sequence[str],
    progress: Progress | None,
    made_s: float,
) -> Bench:
    one, other = (_subject(name, graph, length, cached, load) for name, graph in zip(NAMES, graphs, strict=True))
    ids = drawn_ids(graphs[0].vocabulary, sequences=max(batches), length=length, seed=0)
    with watching(first_uuid() if load.provider == "cuda" else None) as (watch, gpu):
        return bench(
            (one, other),
            {IDS: ids},
            batches,
            plan,
            described=environment(gpu),
            command=command,
            watch=watch,
            progress=progress,
            made_s=made_s * len(batches),
        )
