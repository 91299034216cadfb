"""Tables of the options that have an effect with a backend, a precision or a kind of input, command by command.

See option_support for the tables' types. Imports nothing heavy.
"""

from export.engine.options import COMPATIBILITIES, REFUSALS
from ground.precision import EVERY_WORD, MIXED, PRECISIONS, QUANTISED, WORDS

from .option_support import Axis, Variant, variant

ON_GRAPHS = "a graph's precision is in its types: export it with --precision fp16 or bf16"
OF_ENGINES = "an engine's precision is in its plan: export with --precision fp16 or bf16 and build that graph"
ON_A_GPU = "ONNX Runtime runs on a GPU with --provider cuda"
GRAPH = "an .onnx file or a model directory"


def _onnxruntime(provider: str, where: str, names: str) -> Variant:
    """Return BENCH's row of ONNX Runtime with one of its execution providers."""
    return variant(
        f"ONNX Runtime {where}",
        f"{GRAPH}, --provider {provider}",
        f"backend=onnxruntime provider={provider} streams {names}",
        {"dtype": ON_GRAPHS, "device": ON_A_GPU},
    )


def _package(device: str, where: str, names: str) -> Variant:
    return variant(
        f"a .pt2 file of AOTInductor{where}",
        f"x.pt2 of export --format aoti --device {device}",
        f"backend=aotinductor device={device} mode=eager {names}",
        {"dtype": "a package is compiled in its precision"},
    )


def _engine(backend: str, words: str) -> Variant:
    names = "device=cuda mode=eager,cuda_graph streams flush_l2"
    return variant(words, f"a .plan of build --backend {backend}", names, {"dtype": OF_ENGINES})


# What runs the two models. --backend and --provider may apply to one of them only: a directory beside an engine.
BENCH = Axis(
    picks=frozenset({"backend", "provider"}),
    variants={
        "torch-cpu": variant(
            "torch on the CPU",
            "a model directory, --backend torch",
            "backend=torch device=cpu dtype mode=eager,compiled threads streams",
        ),
        "torch-cuda": variant(
            "torch on a GPU",
            "a model directory, --backend torch --device cuda",
            "backend=torch device=cuda dtype mode=eager,compiled,cuda_graph streams flush_l2",
        ),
        "aotinductor": variant(
            "a package of AOTInductor",
            "a model directory, --backend aotinductor",
            "backend=aotinductor device=cpu dtype mode=eager threads streams",
            {"mode": "it is compiled in any case", "device": "packages are compiled for the CPU here"},
        ),
        "aotinductor-file": _package("cpu", "", "threads streams"),
        "aotinductor-file-cuda": _package("cuda", " for a GPU", "streams flush_l2"),
        "onnxruntime-cpu": _onnxruntime("cpu", "on the CPU", "device=cpu mode=eager threads"),
        "onnxruntime-cuda": _onnxruntime("cuda", "on a GPU", "device=cuda mode=eager,cuda_graph flush_l2"),
        "onnxruntime-tensorrt": _onnxruntime(
            "tensorrt", "through TensorRT", "device=cuda mode=eager,cuda_graph flush_l2"
        ),
        "openvino": variant(
            "OpenVINO on the CPU",
            f"{GRAPH}, --backend openvino",
            "backend=openvino device=cpu dtype mode=eager threads streams",
            {"device": "OpenVINO is run on the CPU here"},
        ),
        "tensorrt": _engine("tensorrt", "TensorRT"),
        "tensorrt-rtx": _engine("tensorrt-rtx", "TensorRT-RTX"),
    },
)

# The kinds of models that `bench` times.
BENCH_OF = Axis(
    variants={
        "models": variant(
            "models",
            "graphs, engines and directories of corp-deploy",
            "backend device provider mode dtype streams flush_l2 names launches images text energy_time",
        ),
        "decoders": variant(
            "graphs of decoders",
            "directories of export-decoder",
            "backend=onnxruntime provider=cpu,cuda length cached",
            {"device": ON_A_GPU},
        ),
    },
)

# The fields of BuildOptions (package export) by the options of `build`.
ENGINE_OPTIONS = {
    "batch": "profiles",
    "sm": "sms",
    "timing_cache": "timing_cache",
    "optimization_level": "optimization_level",
    "workspace_mib": "workspace_bytes",
    "version_compatible": "version_compatible",
    "sparse": "sparse",
}


def _engine_builder(backend: str, words: str) -> Variant:
    refused = REFUSALS[backend]
    return variant(
        words,
        f"--backend {backend}",
        " ".join(name for name, field in ENGINE_OPTIONS.items() if field not in refused),
        {name: refused[field] for name, field in ENGINE_OPTIONS.items() if field in refused}
        | {"device": "an engine is built for a GPU in any case"},
        precision=EVERY_WORD,
        compatibility=COMPATIBILITIES[backend],
    )


def _graph_optimiser(device: str, words: str) -> Variant:
    # The CPU's kernels compute FP16 graphs in float32, and BF16 ones not at all.
    instead = "the rest shapes engines, and an optimised graph takes any batch"
    return variant(
        words,
        f"--backend onnxruntime --device {device}",
        f"device={device}",
        dict.fromkeys((*ENGINE_OPTIONS, "compatibility"), instead),
        precision=WORDS[:1] if device == "cpu" else EVERY_WORD,
    )


BUILD = Axis(
    variants={
        "tensorrt": _engine_builder("tensorrt", "TensorRT"),
        "tensorrt-rtx": _engine_builder("tensorrt-rtx", "TensorRT-RTX"),
        "onnxruntime-cpu": _graph_optimiser("cpu", "ONNX Runtime on the CPU"),
        "onnxruntime-cuda": _graph_optimiser("cuda", "ONNX Runtime on a GPU"),
    },
)

AUDIT = Axis(
    variants={
        "tensorrt": variant("TensorRT", "--backend tensorrt", instead={"sm": REFUSALS["tensorrt"]["sms"]}),
        "tensorrt-rtx": variant("TensorRT-RTX", "--backend tensorrt-rtx", "sm"),
    },
)

_DRAWN = "images text arrays samples seed"
_SEARCHED = "auto dense engine"
_OF_RANGES = "rest scales balance keep_rest"
_OF_INT8 = "weight_bits"


def _quantised(name: str, more: str = "") -> Variant:
    return variant(
        f"precision {name}{' that finds its sites' * bool(more)}",
        f"--precision {name}{' --auto' * bool(more)} --images P",
        f"{_DRAWN} {_OF_RANGES} {_OF_INT8 if name == 'int8' else ''} {more}",
    )


def _of_float(name: str) -> Variant:
    if name in MIXED:
        return variant(f"precision {name} with its sites named", f"--precision {name}", "keep_fp32")
    return variant(f"precision {name}", f"--precision {name}")


# Precisions, several of which may be exported at once.
EXPORT = Axis(
    picks=frozenset(f"keep_fp32 {_SEARCHED} {_DRAWN} {_OF_RANGES} {_OF_INT8}".split()),
    variants={
        **{name: _of_float(name) for name in PRECISIONS},
        **{
            f"{name}-auto": variant(
                f"precision {name} that finds its sites",
                f"--precision {name} --auto --images P",
                f"keep_fp32 {_SEARCHED} {_DRAWN}",
            )
            for name in MIXED
        },
        **{name: _quantised(name) for name in QUANTISED},
        **{f"{name}-auto": _quantised(name, _SEARCHED) for name in QUANTISED},
    },
)

EXPORT_FORMAT = Axis(
    variants={
        "onnx": variant("an ONNX graph", "--format onnx", "opset break_fusion precision keep_fp32"),
        "aoti": variant(
            "a package of AOTInductor",
            "--format aoti",
            "device precision=fp32,fp16,bf16",
            {"precision": "AOTInductor compiles a program in one float type; for the others export ONNX"},
        ),
    },
)

# The head geometry of the exported model.
EXPORT_HEADS = Axis(
    variants={
        "even": variant("a model whose queries and values have one width", "as trained, or square"),
        "uneven": variant("a model with queries narrower than its values", "reduce --attn", "heads"),
    },
)

VERIFY = Axis(
    variants={
        "images": variant("real images", "--images P or --text FILE", "labels moments samples seed hold_out groups"),
        "random": variant("random inputs", "--random N", "seed"),
        "none": variant("the inputs of a golden directory", "verify golden B.plan"),
    },
)

_LIMITS = "min_agreement max_map_error min_iou min_pixels output_limit exclude_output"
_OF_BOTH = f"images tokens arrays samples batch metric metric_time_limit {_LIMITS} logit_threshold map_threshold"
_OF_NAMES = "weights model_kwargs ema weights_key mean std crop_pct interpolation crop_mode outputs"
_OF_MODELS = (
    "head half_factor quantised_factor max_apart moments labels hold_out groups text trust_code runtime polygraphy"
)
# The reference of a proof.
VERIFY_REFERENCE = Axis(
    variants={
        "model": variant("a model as REFERENCE", "verify DIR", f"{_OF_NAMES} {_OF_MODELS} {_OF_BOTH}"),
        "engine": variant(
            "an engine, a graph or a golden directory as REFERENCE",
            "verify A.plan B.plan",
            f"write_golden other_graph {_OF_BOTH}",
        ),
        "decoder": variant(
            "a decoder's graph as CANDIDATES",
            "verify DIR GRAPH --random 2, with a directory of export-decoder",
            "length provider",
        ),
    },
)

CALIBRATE = Axis(
    variants={
        "cpu": variant("the CPU", "--device cpu", "dtype=float32,bfloat16"),
        "cuda": variant("a GPU", "--device cuda", "dtype=float32,bfloat16,tf32"),
    },
)

# The part of a model that is in memory.
CALIBRATE_BY = Axis(
    variants={
        "whole": variant(
            "calibration in one pass",
            "no --sequential",
            "checkpoint_every snapshots groups attn align residual patch_memory",
        ),
        "blocks": variant(
            "--sequential", "--sequential", instead={"checkpoint_every": "each block that is finished is kept"}
        ),
    },
)

# The inputs of the model.
INPUTS = Axis(
    variants={
        "images": variant("images", "--images P", "images workers max_bad labels calibration_images"),
        "text": variant("text", "--text FILE", "text tokens calibration_text"),
        "arrays": variant("arrays", "--arrays FILE", "arrays"),
    },
)
