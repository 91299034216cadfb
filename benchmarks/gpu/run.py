"""All measurements on a GPU, in commands of at most nine minutes each.

    python -m benchmarks.gpu.run --output out --only latency,variants --budget-s 480
    python -m benchmarks.gpu.run --output out --only real --budget-s 180
    python -m benchmarks.gpu.run --output out --only engines

Writes a JSON record of each part after every row, and gpu.md. A run with the same output continues after the finished
rows of a stopped one. An absent package is the reason in a row; rows for which time was too short are listed as
skipped. The part `real` needs the files of `python -m benchmarks.real.packed --output build/packed`, `engines` those of
`python -m benchmarks.gpu.engines --output build/engines`. `--small --device cpu` runs the same code on tiny models in
seconds, which only tests the scripts.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

STARTED_S = time.monotonic()
# Shares of the time left when a part begins; unused time goes to the next part, and at the end to skipped rows.
WEIGHTS = {"latency": 0.4, "variants": 0.3, "engines": 0.15, "real": 0.15}


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the records and the page")
    parser.add_argument("--only", default=",".join(WEIGHTS), help="parts, separated by commas (default: all)")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for everything (default: 540)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that everything runs")
    parser.add_argument("--packed", type=Path, default=Path("build/packed"), help="by benchmarks.real.packed")
    parser.add_argument("--engines", type=Path, default=Path("build/engines"), help="by benchmarks.gpu.engines")
    given = parser.parse_args(words)
    given.only = given.only.split(",")
    unknown = [part for part in given.only if part not in WEIGHTS]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: expected some of {', '.join(WEIGHTS)}")
    if not given.budget_s > 0.0:
        parser.error(f"--budget-s {given.budget_s:g}: expected a positive number of seconds")
    return given


def main(words: Sequence[str] | None = None, say: Callable[[str], None] | None = None) -> None:
    """Run the chosen parts one after the other, then the rows that they skipped."""
    given = parsed(words)
    import torch

    from benchmarks.gpu import engines, latency, real, variants
    from benchmarks.gpu.environment import MUST_MATCH, environment, state_of
    from benchmarks.gpu.page import page
    from benchmarks.gpu.record import Budget, OtherMachine, Record, Task, work
    from benchmarks.gpu.setting import Setting
    from ground.files import write_text
    from perf.timing.watch import unwatched, watching

    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA GPU here; --small --device cpu shows that the scripts run")
    told = say or (lambda line: print(line, flush=True))
    setting = Setting(
        device=given.device,
        small=given.small,
        cache=given.output / "cache",
        packed=given.packed,
        engines=given.engines,
    )
    budget = Budget((STARTED_S if words is None else time.monotonic()) + given.budget_s)
    with ExitStack() as stack:
        watch, gpu = stack.enter_context(watching()) if given.device == "cuda" else (unwatched, None)
        here = environment(given.device, gpu)
        makers: dict[str, Callable[[Record], list[Task]]] = {
            "latency": lambda record: latency.tasks(setting, record, watch),
            "variants": lambda record: variants.tasks(setting, record, watch),
            "engines": lambda record: engines.tasks(setting, record),
            "real": lambda record: real.tasks(setting, record),
        }
        records: dict[str, Record] = {}
        for part in WEIGHTS:
            path = given.output / f"gpu_{part}.json"
            if part in given.only or path.is_file():
                try:
                    records[part] = Record(path, part, here, setting.as_json(), MUST_MATCH)
                except OtherMachine as error:
                    raise SystemExit(str(error)) from None
        for last in (False, True):
            parts = [part for part in WEIGHTS if part in given.only]
            for index, part in enumerate(parts):
                share = 1.0 if last else WEIGHTS[part] / sum(WEIGHTS[each] for each in parts[index:])
                record = records[part]
                if last and not record.skipped:
                    continue
                work(record, makers[part](record), budget.part(share), state=state_of(watch), say=told)
                write_text(given.output / "gpu.md", page({name: each.as_json() for name, each in records.items()}))
                if given.device == "cuda":
                    torch.cuda.empty_cache()
    told(f"{given.output / 'gpu.md'} written, {max(budget.left_s(), 0.0):.0f} s left")


if __name__ == "__main__":
    main()
