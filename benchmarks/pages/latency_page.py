"""Tables of latencies in ONNX Runtime and OpenVINO on the CPU."""

from benchmarks.pages.markdown import Column, Row, interval_of, paragraphs, table_of

NAMES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}


def _median(name: str) -> Column:
    """Return a column of the median time of one model, without its interval."""
    return lambda row: "-" if row["p50_ms"][name] is None else f"{row['p50_ms'][name][0]:.1f}"


P50: dict[str, Column] = {"dense p50 ms": _median("dense"), "reduced p50 ms": _median("reduced")}


def cpu_latency(record: Row) -> str:
    """Return the table of latencies, dense against reduced."""
    columns: dict[str, Column] = {
        "model": "{model}",
        "heads": "{heads}",
        "MACs": "{macs_share:.2f}",
        "batch": "{batch}",
        **P50,
        "speed-up": interval_of("speedup"),
        "A/A noise": interval_of("noise"),
        "realised": "{realised_share:.0%}",
    }
    rows = [{**each, **line} for each in record["rows"] for line in each["rows"]]
    text = "ONNX Runtime on 2 CPU cores, FP32, random weights, interleaved in one process:"
    return paragraphs(text, table_of(rows, columns))


def _agreement(record: Row) -> str:
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


def openvino(record: Row) -> str:
    """Return the agreement in words and the latencies as a table."""
    first = record["latency"][0]
    loads = ", ".join(f"{each['load_before']:.1f}" for each in record["latency"])
    text = (
        f"{first['model']} with random weights in both runtimes, dense against 50 % joint sparsity with square heads "
        f"({first['macs_share']:.2f} of the MACs), on 2 threads of a shared {first['cpu']} (load average before each "
        f"measurement {loads}). Dense and reduced are interleaved in one process. Each runtime has a separate "
        "measurement, so a comparison of two runtimes is less certain than the speed-up within one:"
    )
    columns: dict[str, Column] = {
        "runtime": lambda row: f"{NAMES[row['runtime']]}, computed in {row['arithmetic'].upper()}",
        "batch": "{batch}",
        "dense p50 ms": interval_of("p50_ms.dense", 1),
        "reduced p50 ms": interval_of("p50_ms.reduced", 1),
        "speed-up": interval_of("speedup"),
    }
    rows = [{**each, **row} for each in record["latency"] for row in each["rows"]]
    return paragraphs(_agreement(record), text, table_of(rows, columns))
