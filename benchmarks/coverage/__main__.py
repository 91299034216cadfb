"""Architectures through the whole chain, from sites to engines.

    python -m benchmarks.coverage --output benchmarks/results/coverage.json

Small instances with random weights (those of transformers if it is installed): sites, calibration on random inputs,
half of everything removed by three presets, FP32 and FP16 graphs against torch, and TensorRT-RTX plans of the dense and
of the reduced model.
"""

from benchmarks.coverage.chain import row_of
from benchmarks.coverage.instances import INSTANCES
from benchmarks.harness import Bench, measures


@measures("benchmarks/coverage")
def main(bench: Bench) -> None:
    """Take every instance through the chain."""
    for instance in INSTANCES:
        bench.row(instance.key, row_of, instance)


if __name__ == "__main__":
    main()
