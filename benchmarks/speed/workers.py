"""Images per second of a calibration by one process with all threads, and by workers with one thread each.

    python -m benchmarks.speed.workers --output benchmarks/results/workers.json

Workers are processes with a `Collector`, or actors of Ray with one. All take turns, round after round. The time of a
run begins when the workers have loaded the model, and ends when the moments of all images are written: each worker
writes one part, and the parts are merged. A ratio is the median over rounds of a run's rate over that of one process in
this round. Weights are random and images are noise.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray

import corp_deploy
from benchmarks.harness import Bench, measures
from benchmarks.speed.random_models import random_checkpoint, save_noise
from corp_deploy.store.checkpoint import save
from ground.threads import affinity_cpus, set_thread_policy_

ONE, PROCESSES, RAY = "one process", "processes", "actors of Ray"
WORKERS = (1, 2, 4)
BATCH = 16
KEY = ("way", "workers")
Key = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The model and the images of a calibration, and a folder for the moments."""

    model: Path
    images: Path
    folder: Path

    def shares(self, count: int) -> list[NDArray[np.float32]]:
        return np.array_split(np.load(self.images, mmap_mode="r"), count)

    def collect(self, collector: corp_deploy.Collector, images: NDArray[np.float32]) -> Path:
        collector.clear()
        for start in range(0, len(images), BATCH):
            collector.update(images[start : start + BATCH])
        part = self.folder / f"{collector.digest}.safetensors"
        collector.moments(part)
        return part

    def merge(self, parts: list[Path]) -> None:
        if len(parts) > 1:
            corp_deploy.merge_moments(parts, self.folder / "moments.safetensors")


class Worker:
    """A collector that has loaded the model, with its number of threads."""

    def __init__(self, job: Job, threads: int) -> None:
        torch.set_num_threads(threads)
        self.job, self.collector = job, corp_deploy.Collector(job.model)

    def collect(self, index: int, count: int) -> Path:
        return self.job.collect(self.collector, self.job.shares(count)[index])


_workers: list[Worker] = []


def _load(job: Job, threads: int) -> None:
    _workers.append(Worker(job, threads))


def _collect_share(index: int, count: int) -> Path:
    return _workers[0].collect(index, count)


Start = Callable[[int, int], Callable[[], Path]]
"""Starts the calibration of a share in a worker, and returns a function that waits for the part."""


@contextmanager
def processes(job: Job, count: int, threads: int) -> Iterator[list[Start]]:
    """Yield processes that have loaded the model."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = [
            stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn, initializer=_load, initargs=(job, threads)))
            for _ in range(count)
        ]
        for ready in [pool.submit(os.getpid) for pool in pools]:
            ready.result()
        yield [lambda *share, pool=pool: pool.submit(_collect_share, *share).result for pool in pools]


@contextmanager
def actors(job: Job, count: int) -> Iterator[list[Start]]:
    """Yield actors of Ray on this machine that have loaded the model."""
    import ray

    fair = {"worker_niceness": 0}  # by default other programs go first
    ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False, _system_config=fair)
    try:
        every: list[Any] = [ray.remote(num_cpus=1)(Worker).remote(job, 1) for _ in range(count)]
        yield [lambda *share, actor=actor: partial(ray.get, actor.collect.remote(*share)) for actor in every]
    finally:
        ray.shutdown()


def taken_s(job: Job, workers: list[Start]) -> float:
    """Return the seconds of a calibration by these workers."""
    start = time.perf_counter()
    job.merge([part() for part in [begin(index, len(workers)) for index, begin in enumerate(workers)]])
    return time.perf_counter() - start


def prepared(model: str, kwargs: Mapping[str, Any], images: int, folder: Path) -> Job:
    """Write a model with random weights and images of noise."""
    dense = random_checkpoint(model, **kwargs)
    save(dense, folder / "dense")
    return Job(model=folder / "dense", images=save_noise(dense.model, images, folder / "images.npy"), folder=folder)


def measured(job: Job, rounds: int) -> dict[Key, list[float]]:
    """Return the seconds of each run in each round; odd rounds go backwards through the runs."""
    most = max(WORKERS)
    with processes(job, 1, affinity_cpus()) as one, processes(job, most, 1) as many, actors(job, most) as of_ray:
        runs = {(ONE, 1): one}
        for count in WORKERS:
            runs |= {(PROCESSES, count): many[:count], (RAY, count): of_ray[:count]}
        for part in [begin(0, 8) for begin in (*one, *many, *of_ray)]:
            part()
        samples: dict[Key, list[float]] = {key: [] for key in runs}
        for number in range(rounds):
            for key in list(runs)[:: -1 if number % 2 else 1]:
                samples[key].append(taken_s(job, runs[key]))
    return samples


def figures(samples: Mapping[Key, list[float]], key: Key, images: int) -> dict[str, Any]:
    ratios = [one / taken for one, taken in zip(samples[ONE, 1], samples[key], strict=True)]
    return {
        "images_per_s": images / statistics.median(samples[key]),
        "ratio": statistics.median(ratios),
        "samples_s": samples[key],
    }


@measures("benchmarks/workers")
@click.option("--model", default="deit_tiny_patch16_224", show_default=True)
@click.option("--size", type=click.IntRange(16), default=224, show_default=True)
@click.option("--images", type=click.IntRange(8), default=128, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
def main(bench: Bench, model: str, size: int, images: int, rounds: int) -> None:
    """Measure one process, and processes and actors of Ray."""
    set_thread_policy_(os.environ, None)  # of processes started from here, as of commands
    bench.share(model=model, size=size, images=images, rounds=rounds, cpus=affinity_cpus())

    @cache
    def samples() -> dict[Key, list[float]]:
        with tempfile.TemporaryDirectory() as folder:
            before = os.getloadavg()[0]
            found = measured(prepared(model, {"img_size": size}, images, Path(folder)), rounds)
        bench.record.set("load_average", [before, os.getloadavg()[0]])
        return found

    for key in [(ONE, 1), *((way, count) for way in (PROCESSES, RAY) for count in WORKERS)]:
        bench.row(dict(zip(KEY, key, strict=True)), lambda key=key: figures(samples(), key, images))


if __name__ == "__main__":
    main()
