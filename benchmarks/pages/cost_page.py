"""What calibrating, reducing and proving cost, by their records."""

import statistics
from typing import Any

from benchmarks.pages.markdown import table


def calibration(record: dict[str, Any]) -> str:
    """What one calibration costs, beside the processor it was measured on; nothing of records that don't name it."""
    options, passes = record["options"], record["speed"]["ratio_wall"]
    cpu, threads = record["environment"].get("cpu"), record["environment"]["threads"]
    if cpu is None:
        return ""
    images = int(options["batches"]) * int(options["batch_size"])
    text = f"Calibrating {options['model']} on {images} images, batch {options['batch_size']}, {threads} threads of an "
    text += f"{cpu}, from opening to the moments: {passes['calibrate']:.2f} times the faster of a bare forward pass in "
    text += "whole batches and one in pieces"
    system = passes.get("calibrate_with_system")
    return text + (f"; {system:.2f} with CORP's per-image system." if system else ".")


def passes(record: dict[str, Any]) -> str:
    """What a command costs beside a forward pass over the same images, which is the faster of the two bare ones."""
    kwargs = "".join(f", {name} {value}" for name, value in record["model_kwargs"].items())
    text = (
        f"CPU time in bare forward passes over the same images: {record['model']}{kwargs}, {record['images']} images, "
    )
    text += f"batch {record['batch_size']}, {record['threads']} threads, {record['cpu']}:"
    commands = {
        "calibrate": "`calibrate`",
        "uniform": f"`reduce --mlp {record['sparsity']:g} --attn {record['sparsity']:g}`",
        "macs": f"`reduce --macs {record['share_of_macs']:g}`",
        "loop": f"`reduce --mlp {record['sparsity']:g} --attn {record['sparsity']:g} --closed-loop`",
        "macs and loop": f"`reduce --macs {record['share_of_macs']:g} --closed-loop`",
    }
    rows = [[words, f"{record['passes'][row]:.1f}"] for row, words in commands.items() if row in record["passes"]]
    return text + "\n\n" + table(["command", "passes"], rows)


def reduction(record: dict[str, Any]) -> str:
    """What a whole uniform reduction takes in seconds: elimination, exchanges, recovery, checks and writing."""
    cpu, wall = (statistics.median(record["samples"]["uniform"][clock]) for clock in ("cpu_s", "wall_s"))
    return (
        f"Reducing {record['model']} from its moments by preset best, {record['sparsity']:.0%} of every width, all of "
        f"it (elimination, exchanges, recovery, writing): {wall:.0f} seconds, {cpu:.0f} of CPU time, "
        f"{record['threads']} threads, {record['cpu']}."
    )


def busy(record: dict[str, Any]) -> str:
    """Return what a busy neighbour costs a reduction, with passive threads and with OpenMP's default."""
    machine = record["environment"]
    rows = [
        [
            row["beside"],
            *(f"{row[f'{side}_{clock}']:.1f}" for clock in ("wall_s", "cpu_s") for side in ("default", "passive")),
            f"{row['ratio_wall_s']:.2f}",
        ]
        for row in record["medians"]
    ]
    rounds = len({row["round"] for row in record["rows"]})
    return (
        f"`reduce --macs 0.7` of the digits example as a whole process on {machine['cpu_count']} CPUs "
        f"({machine['cpu']}), medians of {rounds} interleaved rounds. The command lets OpenMP threads sleep after a "
        "short spin while they wait, unless you set a policy; by default they spin long:\n\n"
        + table(
            ["next to", "seconds, default", "sleeping", "CPU seconds, default", "sleeping", "ratio of seconds"], rows
        )
    )


def proof_cost(record: dict[str, Any]) -> str:
    """What a proof costs beside the passes that it can't do without."""
    verify = record["verify"]
    return (
        f"Verifying {record['model']}, its half and the half's FP32 and FP16 graphs on {record['images']} images at "
        f"batches {', '.join(map(str, record['batches']))}, {record['threads']} threads, {record['cpu']}: "
        f"{verify['cpu_s']:.0f} CPU seconds, {record['ratio']:.2f} times the passes that it needs in any "
        f"case (one of each of the four, and one of the dense model in FP16), and {verify['peak_mb'] / 1e3:.1f} GB."
    )


def sweep_cost(record: dict[str, Any]) -> str:
    """What a sweep costs beside solves made apart."""
    return (
        f"{len(record['sparsities'])} sparsities of {record['model']} from one moments file, scoring included, "
        f"{record['threads']} threads: {record['ratio']:.2f} times one whole solve and nine that reuse its "
        f"eliminations, {record['of_ten_apart']:.2f} times ten separate solves. No solve reads an image."
    )


def long_runs(record: dict[str, Any]) -> str:
    """What long runs hold, and whether it grows."""
    rows = []
    for run in (record["calibration"], record["serving"]):
        slope = run["slope"]
        rows.append(
            [
                run["of"],
                f"{run['least_mib']:.0f} to {run['peak_mib']:.0f}",
                f"{slope['mib_per_1000']:.1f} ({slope['low']:.1f} to {slope['high']:.1f})",
                f"{run['seconds']:.0f}",
            ]
        )
    text = (
        "Private memory of a process after the first fifth of a long run, and its slope (Theil and Sen, 95 % interval):"
    )
    return text + "\n\n" + table(["run", "MiB held", "MiB more per 1,000", "seconds"], rows)
