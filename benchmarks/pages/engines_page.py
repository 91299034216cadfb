"""Tables of engines: head geometries, fusion breaks and plans for several GPUs."""

from typing import Any

from benchmarks.pages.markdown import table


def break_fusion(record: dict[str, Any]) -> str:
    """Return the table of plans with and without fusion breaks, and the cost of several targets."""
    by_site: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        by_site.setdefault(row["break"], []).append(row)
    targets = ", ".join(dict.fromkeys(row["target"] for row in record["rows"]))
    text = (
        f"`export --break-fusion SITE` for {record['depth']} blocks of a ViT-S, FP16, as TensorRT-RTX "
        f"{record['library_version']} plans of batches 1:8:64 for SM {targets} (equal except for their bytes), built "
        "without a GPU. Memory is that of weights and activations as the builder reports it. A break at a module's "
        "output keeps the module out of the next kernel; a break at a softmax splits the fused attention kernel:"
    )
    head = ["fusion broken at", "kernels", "fused attention", "plan MB", "device memory MB"]
    return f"{text}\n\n{table(head, [_row(site, rows) for site, rows in by_site.items()])}\n\n{_price(record)}"


def _row(site: str, rows: list[dict[str, Any]]) -> list[str]:
    kernels = sorted({row["kernels"] for row in rows})
    fused = sorted({len(row["fused_attention"]) for row in rows})
    memory = sorted({max(row["device_memory_bytes"].values()) for row in rows})
    name = f"`{site}`" if site else "nothing"
    plan = f"{rows[0]['plan_bytes'] / 1e6:.2f}"
    return [name, _each(kernels), _each(fused), plan, _each([f"{size / 1e6:.1f}" for size in memory])]


def _each(values: list[Any]) -> str:
    return " to ".join(map(str, dict.fromkeys((values[0], values[-1]))))


def _price(record: dict[str, Any]) -> str:
    price = record["compatibility"]["targets"]
    own, alone = price["own"], next(plan for plan in price["plans"] if plan["target"] == "sm86")
    portable = record["compatibility"]["portable"]
    same = all(plan["kernels"] == portable["own"]["kernels"] for plan in portable["plans"])
    return (
        f"One plan for SM 75, 86 and 89 (`build --compatibility targets`) needs "
        f"{100 * (own['plan_bytes'] / alone['plan_bytes'] - 1):.1f} % more bytes and "
        f"{100 * (own['device_memory_bytes'] / alone['device_memory_bytes'] - 1):.0f} % more memory than a plan for SM "
        f"86 alone ({own['kernels']} kernels for {alone['kernels']}). A `portable` plan, for SM 80 and newer, "
        f"{'has as many kernels as' if same else 'has other kernels than'} a plan for each of its targets. The times "
        "were not measured, which needs a GPU; `build` prints the commands."
    )


def engines(record: dict[str, Any]) -> str:
    """Return the table of fused attention, kernels and plan sizes."""
    rows = [
        [
            row["model"],
            row["variant"],
            f"{row['macs'] / 1e9:.2f}",
            f"{row['fused_attention']} of {row['blocks']}",
            str(row["kernels"]),
            f"{row['plan_bytes'] / 1e6:.1f}",
        ]
        for row in record["rows"]
    ]
    text = "TensorRT-RTX engines built without a GPU, FP16, SM86, 50 % joint sparsity; two builds give equal bytes:"
    return text + "\n\n" + table(["model", "heads", "GMAC", "fused attention", "kernels", "plan MB"], rows)
