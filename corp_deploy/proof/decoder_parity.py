"""Proofs and timings of decoders' graphs.

A graph is compared with transformers on the same directory, in prefill and token by token with the cache. Two graphs
are timed interleaved, in prefill by length and in one decoding step by batch.

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
from corp_deploy.invocation.running import DecoderLoad
from corp_deploy.store.decoder_graph import DecoderGraph, export_decoder, facts_of_graph, graph_of_directory
from corp_deploy.store.transformers_directory import decoder_arguments
from ground.errors import BadInput
from ground.files import sha256_of_file
from ground.records import json_from_record
from perf.bench.bench import BenchSubject, bench_subjects
from perf.parity.measures import measure_outputs
from perf.record.decoders import DecoderBench, Prefill
from perf.record.runs import Flat
from perf.runners.cuda import read_gpu_uuid
from perf.runners.decoder import IDS, LOGITS, DecoderRunner
from perf.runners.onnx_session import Provider
from perf.timing.laps import Plan
from perf.timing.watch import environment, watching

KIND, VERSION = "decoder-parity", 1
MOST_ERROR = 1e-4  # of a graph in FP32, which only orders sums differently from transformers
Status = Literal["PASS", "FAIL", "MEASURED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLink:
    """The comparison of a decoder in prefill or token by token; `bound` limits the relative error, if not None."""

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
    """The comparisons of a decoder's graph on `sequences` of `length` tokens."""

    model: str
    graph: Mapping[str, Any]
    runtime: Flat
    sequences: int
    length: int
    links: tuple[DecoderLink, ...]

    @property
    def passed(self) -> bool:
        return all(link.status != "FAIL" for link in self.links)

    def as_json(self) -> dict[str, Any]:
        links = [{**asdict(link), "status": link.status} for link in self.links]
        return {"kind": KIND, "version": VERSION, **asdict(self), "links": links}


def draw_ids(vocabulary: int, *, sequences: int, length: int, seed: int) -> NDArray[np.int64]:
    """Draw random tokens [B,N]."""
    return np.random.default_rng(seed).integers(0, vocabulary, (sequences, length), dtype=np.int64)


def verify_decoder(
    directory: Path,
    graph: DecoderGraph,
    ids_BN: NDArray[np.int64],
    *,
    provider: Provider = "cpu",
    max_error: float | None = None,
) -> DecoderParity:
    """Compare a decoder's graph with transformers on the directory that it was exported from, on these tokens.

    `max_error` limits the relative error of the logits; None limits only a graph in FP32, to MOST_ERROR. Raises
    BadInput if the directory has no decoder, the graph is another model's, or there are too many tokens, and Missing if
    transformers, ONNX Runtime or the provider is absent.
    """
    decoder, cache = decoder_arguments(directory, {})[1].decoder, graph.cache
    of_graph, of_model = (cache.layers, cache.groups, cache.head), (decoder.layers, decoder.groups, decoder.head)
    if (graph.vocabulary, of_graph) != (decoder.vocabulary, of_model):
        raise BadInput(
            f"{graph.path}: vocabulary {graph.vocabulary}; layers, groups and head size {list(of_graph)}; {directory}: "
            f"{decoder.vocabulary}; {list(of_model)}; give the directory that the graph was exported from"
        )
    length, longest = ids_BN.shape[1], min(graph.longest, decoder.longest)
    if length > longest:
        raise BadInput(f"{length} tokens, expected at most {longest} for {directory}; give a smaller --length")
    reference, feeds = open_reference(directory), {IDS: ids_BN}
    with DecoderRunner(graph.path, cache, length, provider=provider) as runner:
        runtime = runner.describe()
        bound = MOST_ERROR if max_error is None and runtime["precision"] == "fp32" else max_error
        links = (
            _link("prefill", reference.prefill(ids_BN), runner(feeds)[LOGITS], bound),
            _link("token by token", reference.steps(ids_BN), runner.steps(feeds)[LOGITS], bound),
        )
    return DecoderParity(
        model=str(directory),
        graph=facts_of_graph(graph),
        runtime=runtime,
        sequences=len(ids_BN),
        length=length,
        links=links,
    )


def _link(name: str, expected: NDArray[np.float32], actual: NDArray[np.float32], bound: float | None) -> DecoderLink:
    found = json_from_record(measure_outputs(expected, actual, role="token logits"))  # non-finite values become null
    return DecoderLink(name=name, measures=found, bound=bound)


NAMES = ("dense", "reduced")


def measure_decoders(
    dense: Path,
    reduced: Path,
    load: DecoderLoad,
    plan: Plan,
    *,
    command: Sequence[str] = (),
    progress: Callable[[float, str], None] | None = None,
) -> DecoderBench:
    """Time two directories of export-decoder, or plain ones, which are exported to FP32 first.

    The plan's time limit is that of each length and each batch size, and includes the time of exporting. Raises
    BadInput if a directory is neither, the vocabularies differ, or a decoder can't place so many tokens, and Missing if
    a package, the provider or a device is absent.
    """
    began_s = perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        graphs = dict[str, DecoderGraph]()
        for name, path in zip(NAMES, (dense, reduced), strict=True):
            has_graph = (path / SETTINGS).is_file()
            if not has_graph:
                export_decoder(path, Path(scratch) / name)
            graphs[name] = graph_of_directory(path if has_graph else Path(scratch) / name)
        _require_comparable(load, *graphs.values())
        every = [(length, 0, (1,)) for length in load.lengths] + [(load.cached + 1, load.cached, load.batches)]
        benches, made_s = [], (perf_counter() - began_s) / (len(load.lengths) + len(load.batches))
        for index, (length, cached, batches) in enumerate(every):

            def say(share: float, text: str, index: int = index) -> None:
                if progress is not None:
                    progress((index + share) / len(every), text)

            one, other = (_subject(name, graph, length, cached, load) for name, graph in graphs.items())
            ids = draw_ids(graphs["dense"].vocabulary, sequences=max(batches), length=length, seed=0)
            with watching(read_gpu_uuid() if load.provider == "cuda" else None) as (watch, gpu):
                benches.append(
                    bench_subjects(
                        (one, other),
                        {IDS: ids},
                        batches,
                        plan,
                        described=environment(gpu),
                        command=command,
                        watch=watch,
                        progress=say,
                        made_s=made_s * len(batches),
                    )
                )
    *prefill, decode = benches
    words = [*(f"prefill of {length} tokens" for length in load.lengths), f"decoding behind {load.cached} tokens"]
    return DecoderBench(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=tuple(command),
        caches={name: graph.cache for name, graph in graphs.items()},
        prefill=tuple(Prefill(length=length, bench=each) for length, each in zip(load.lengths, prefill, strict=True)),
        cached=load.cached,
        decode=decode,
        warnings=tuple(
            f"{what}: {warning}" for what, each in zip(words, benches, strict=True) for warning in each.warnings
        ),
    )


def _require_comparable(load: DecoderLoad, dense: DecoderGraph, reduced: DecoderGraph) -> None:
    if dense.vocabulary != reduced.vocabulary:
        raise BadInput(
            f"{dense.path} has a vocabulary of {dense.vocabulary}, {reduced.path} of {reduced.vocabulary}; expected "
            "equal ones"
        )
    for graph in (dense, reduced):
        DecoderRunner(graph.path, graph.cache, load.longest, provider=load.provider)  # raises without the provider
        if load.longest > graph.longest:
            raise BadInput(
                f"{graph.path}: {load.longest} tokens, expected at most {graph.longest}; give smaller --length and "
                "--cached"
            )


def _subject(name: str, graph: DecoderGraph, length: int, cached: int, load: DecoderLoad) -> BenchSubject:
    opened = partial(
        DecoderRunner, graph.path, graph.cache, length, cached=cached, provider=load.provider, threads=load.threads
    )
    return BenchSubject(name=name, open=opened, size_bytes=graph.size_bytes, sha256=sha256_of_file(graph.path))
