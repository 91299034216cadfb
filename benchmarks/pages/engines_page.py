"""What the page on engines says of plans, of fusion breaks and of plans for several GPUs."""

from typing import Any

from benchmarks.pages.markdown import table


def break_fusion(record: dict[str, Any]) -> str:
    """Plans with and without breaks, and what more targets cost."""
    by_site: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        by_site.setdefault(row["break"], []).append(row)
    targets = ", ".join(dict.fromkeys(row["target"] for row in record["rows"]))
    text = (
        f"The effect of `export --break-fusion SITE`: {record['depth']} blocks of a ViT-S, FP16, as TensorRT-RTX "
        f"{record['library_version']} plans of batches 1:8:64 for SM {targets} (equal except for their bytes), built "
        "without a GPU; memory is weights and activations as the builder reports them. A break at a module's output "
        "keeps the module out of the next kernel; a break at a softmax splits the fused attention kernel:"
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
        f"`build --compatibility targets` for SM 75, 86 and 89 in one plan costs "
        f"{100 * (own['plan_bytes'] / alone['plan_bytes'] - 1):.1f} % more bytes and "
        f"{100 * (own['device_memory_bytes'] / alone['device_memory_bytes'] - 1):.0f} % more memory than SM 86 alone "
        f"({own['kernels']} kernels for {alone['kernels']}); `portable`, which begins at SM 80, "
        f"{'has as many kernels as' if same else 'has other kernels than'} a plan for each of its targets. Their times "
        "were not measured: this needs a GPU, and `build` prints the commands."
    )


def engines(record: dict[str, Any]) -> str:
    """Fused attention, kernels and plan sizes."""
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
