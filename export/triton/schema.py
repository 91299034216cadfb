"""The fields that config.pbtxt may have, and what each holds (Triton's model_config.proto, release 26.07)."""

import difflib
from collections.abc import Iterator

from .pbtxt import Field, Message, Name

_TENSOR = {"data_type": "name", "dims": "int", "zero_data": "bool", "random_data": "bool", "input_data_file": "text"}
_SHAPES = {"key": "text", "value": {"dim": "int"}}
_RESHAPE = {"shape": "int"}
_BUFFER = {"enable": "bool"}
_ACCELERATOR = {"name": "text", "parameters": {"key": "text", "value": "text"}}
_QUEUE_POLICY = {
    "timeout_action": "name",
    "default_timeout_microseconds": "int",
    "allow_timeout_override": "bool",
    "max_queue_size": "int",
}
_BORDER = {
    "name": "text",
    "data_type": "name",
    "dims": "int",
    "reshape": _RESHAPE,
    "is_shape_tensor": "bool",
    "is_non_linear_format_io": "bool",
}
FIELDS: dict[str, object] = {
    "name": "text",
    "platform": "text",
    "backend": "text",
    "runtime": "text",
    "max_batch_size": "int",
    "default_model_filename": "text",
    "version_policy": {"latest": {"num_versions": "int"}, "all": {}, "specific": {"versions": "int"}},
    "input": {**_BORDER, "format": "name", "allow_ragged_batch": "bool", "optional": "bool"},
    "output": {**_BORDER, "label_filename": "text"},
    "batch_input": None,
    "batch_output": None,
    "instance_group": {
        "name": "text",
        "kind": "name",
        "count": "int",
        "gpus": "int",
        "rate_limiter": None,
        "secondary_devices": None,
        "profile": "text",
        "passive": "bool",
        "host_policy": "text",
    },
    "dynamic_batching": {
        "preferred_batch_size": "int",
        "max_queue_delay_microseconds": "int",
        "preserve_ordering": "bool",
        "priority_levels": "int",
        "default_priority_level": "int",
        "default_queue_policy": _QUEUE_POLICY,
        "priority_queue_policy": {"key": "int", "value": _QUEUE_POLICY},
    },
    "sequence_batching": None,
    "ensemble_scheduling": None,
    "optimization": {
        "graph": {"level": "int"},
        "priority": "name",
        "cuda": {
            "graphs": "bool",
            "busy_wait_events": "bool",
            "output_copy_stream": "bool",
            "graph_spec": {
                "batch_size": "int",
                "input": _SHAPES,
                "graph_lower_bound": {"batch_size": "int", "input": _SHAPES},
            },
        },
        "execution_accelerators": {
            "gpu_execution_accelerator": _ACCELERATOR,
            "cpu_execution_accelerator": _ACCELERATOR,
        },
        "input_pinned_memory": _BUFFER,
        "output_pinned_memory": _BUFFER,
        "gather_kernel_buffer_threshold": "int",
        "eager_batching": "bool",
    },
    "cc_model_filenames": {"key": "text", "value": "text"},
    "metric_tags": {"key": "text", "value": "text"},
    "parameters": {"key": "text", "value": {"string_value": "text"}},
    "model_warmup": {"name": "text", "batch_size": "int", "count": "int", "inputs": {"key": "text", "value": _TENSOR}},
    "model_operations": None,
    "model_transaction_policy": {"decoupled": "bool"},
    "model_repository_agents": None,
    "response_cache": {"enable": "bool"},
    "model_metrics": None,
}
_KINDS = {"text": "a text in quotes", "int": "a whole number", "bool": "true or false", "name": "a bare word"}


def misused_fields(message: Message, fields: dict[str, object] = FIELDS, path: str = "") -> Iterator[tuple[int, str]]:
    """Line and complaint for every field that Triton does not know or that holds the wrong kind of value."""
    for field in message.fields:
        where = f"{path}{field.name}"
        if field.name not in fields:
            near = difflib.get_close_matches(field.name, fields, n=1)
            hint = f"; nearest known is {near[0]!r}" if near else ""
            yield field.line, f"{where} is no field of a model configuration{hint}"
            continue
        kind = fields[field.name]
        if isinstance(kind, dict):
            if isinstance(field.value, Message):
                yield from misused_fields(field.value, kind, f"{where}.")
            else:
                yield field.line, f"{where} holds fields in braces, got {field.value!r}"
        elif isinstance(kind, str) and not _holds(field, kind):
            yield field.line, f"{where} is {_KINDS[kind]}, got {field.value!r}"


def _holds(field: Field, kind: str) -> bool:
    value = field.value
    return {
        "text": isinstance(value, str) and not isinstance(value, Name),
        "int": type(value) is int,
        "bool": isinstance(value, bool) or (type(value) is int and value in (0, 1)),
        "name": isinstance(value, Name),
    }[kind]
