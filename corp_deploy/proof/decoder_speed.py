"""Two decoders' graphs side by side: prefill by length, and a step of decoding by batch, as perf times any two."""

import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter

from corp_deploy.families.decoder_builder import SETTINGS
from corp_deploy.invocation.decoding import DecoderLoad
from corp_deploy.store.decoder_graph import DecoderGraph, export_decoder, graph_of_directory
from ground.errors import BadInput
from ground.files import sha256_of_file
from perf.bench.bench import Subject, bench
from perf.record.decoders import DecoderBench, Prefill
from perf.record.runs import Bench
from perf.runners.cuda import first_uuid
from perf.runners.decoder import IDS, DecoderRunner
from perf.timing.laps import Plan
from perf.timing.watch import environment, watching

from .decoder_parity import drawn_ids

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
