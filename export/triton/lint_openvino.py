"""A config against what Triton's OpenVINO backend does with it (its src/openvino.cc)."""

import re
from collections.abc import Iterator

from .findings import ERROR, WARNING, Complaint
from .pbtxt import Message

_SWITCH = r"(?i)yes|no"
# What each key may hold; the backend reads no other and says nothing of it.
PARAMETERS = {
    "CPU_EXTENSION_PATH": r".+",
    "INFERENCE_NUM_THREADS": r"\d+",
    "COMPILATION_NUM_THREADS": r"\d+",
    "HINT_BF16": r"(?i)yes",
    "NUM_STREAMS": r"(?i)auto|numa|\d+",
    "PERFORMANCE_HINT": r"(?i)latency|throughput|cumulative_throughput",
    "SKIP_OV_DYNAMIC_BATCHSIZE": _SWITCH,
    "ENABLE_BATCH_PADDING": _SWITCH,
    "RESHAPE_IO_LAYERS": _SWITCH,
    "TARGET_DEVICE": r".+",
}


def openvino_limits(config: Message) -> Iterator[Complaint]:
    """Where it would not load, would fail at a request, or would not do what the config seems to ask."""
    yield from _parameters(config)
    yield from _kinds(config)
    yield from _batches(config)


def _parameters(config: Message) -> Iterator[Complaint]:
    for entry in config.messages("parameters"):
        key, value = entry.text("key"), _value(entry)
        if key not in PARAMETERS:
            what = f"parameter {key!r} is none that the OpenVINO backend reads: it is ignored"
            yield Complaint(severity=WARNING, line=entry.line, what=what, remedy=f"known are {', '.join(PARAMETERS)}")
        elif not re.fullmatch(PARAMETERS[key], value):
            remedy = f"write what it takes: {PARAMETERS[key].removeprefix('(?i)')}"
            yield Complaint(severity=ERROR, line=entry.line, what=f"parameter {key} is {value!r}", remedy=remedy)


def _kinds(config: Message) -> Iterator[Complaint]:
    for group in config.messages("instance_group"):
        kind = group.text("kind")
        if kind not in ("KIND_CPU", "KIND_AUTO", ""):
            what = f"the OpenVINO backend runs on the CPU, got {kind}"
            yield Complaint(severity=ERROR, line=group.line_of("kind"), what=what, remedy="write kind: KIND_CPU")
    if all(group.text("kind") != "KIND_CPU" for group in config.messages("instance_group")):
        what = "without kind KIND_CPU a server with a GPU would start it there, which it refuses"
        yield Complaint(
            severity=WARNING, line=config.line_of("instance_group"), what=what, remedy="write kind: KIND_CPU"
        )


def _batches(config: Message) -> Iterator[Complaint]:
    limit, line = config.number("max_batch_size"), config.line_of("max_batch_size")
    if limit < 2:
        return
    remedy = "write max_batch_size: 0 and -1 in front of the dims"
    padded = any(
        entry.text("key") == "ENABLE_BATCH_PADDING" and _value(entry).lower() == "yes"
        for entry in config.messages("parameters")
    )
    if padded:
        what = f"every request is computed as one of {limit}, which smaller ones are filled up to"
        yield Complaint(severity=WARNING, line=line, what=what, remedy=remedy)
    else:
        what = f"requests of fewer than {limit} fail: the OpenVINO backend fixes the batch at max_batch_size"
        yield Complaint(severity=ERROR, line=line, what=what, remedy=f"{remedy}, or set ENABLE_BATCH_PADDING to YES")


def _value(entry: Message) -> str:
    return (entry.message("value") or Message((), entry.line)).text("string_value")
