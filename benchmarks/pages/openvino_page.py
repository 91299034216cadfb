"""The table of graphs in OpenVINO and ONNX Runtime."""

from collections.abc import Mapping
from typing import Any

from benchmarks.pages.markdown import interval, table

NAMES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}


def _agreement(record: Mapping[str, Any]) -> str:
    rows = [row for row in record["agreement"] if "refused" not in row]
    worst = max(rows, key=lambda row: row["openvino_of_onnxruntime"])
    families = {(row["source"], row["family"]) for row in rows}
    missed = [row["name"] for row in rows if row["openvino_of_onnxruntime"] > record["bound"]]
    largest = max(row["onnxruntime_of_torch"] for row in rows)
    return (
        f"OpenVINO reads the same graphs. For FP32 graphs of {len(rows)} architectures with random weights "
        f"({len(families)} families of the "
        f"[supported models](../support.md), {len(missed)} models beyond {record['bound']:g}), the outputs of "
        f"OpenVINO in float32 differ from ONNX Runtime's by at most {worst['openvino_of_onnxruntime']:.1e} of "
        f"their norm ({worst['name']}), and ONNX Runtime's from torch's by at most {largest:.1e}."
    )


def _latency(record: Mapping[str, Any]) -> str:
    lines = []
    for each in record["latency"]:
        runtime = f"{NAMES[each['runtime']]}, computed in {each['arithmetic'].upper()}"
        for row in each["rows"]:
            cells = [interval(row["p50_ms"][name], 1) for name in ("dense", "reduced")]
            lines.append([runtime, str(row["batch"]), *cells, interval(row["speedup"])])
    return table(["runtime", "batch", "dense p50 ms", "reduced p50 ms", "speed-up"], lines)


def openvino(record: Mapping[str, Any]) -> str:
    """Return the agreement in words and the latencies as a table."""
    first = record["latency"][0]
    loads = ", ".join(f"{each['load_before']:.1f}" for each in record["latency"])
    text = (
        f"{first['model']} with random weights in both runtimes, dense against 50 % joint sparsity with square heads "
        f"({first['macs_share']:.2f} of the MACs), on 2 threads of a shared {first['cpu']} (load average before each "
        f"measurement {loads}). Dense and reduced are interleaved in one process. Each runtime has a separate "
        "measurement, so a comparison of two runtimes is less certain than the speed-up within one:"
    )
    return "\n\n".join([_agreement(record), text, _latency(record), *record.get("remarks", [])])
