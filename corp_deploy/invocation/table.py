"""The table of which backend honours which option, command by command. Imports nothing heavy."""

from collections.abc import Mapping

from export.engine.options import COMPATIBILITIES, REFUSALS
from ground.precision import EVERY_WORD, MIXED, PRECISIONS, QUANTISED, WORDS

from .option_support import ANY, Axis, Values, Variant

ON_GRAPHS = "a graph's precision is in its types: export it with --precision fp16 or bf16"
OF_ENGINES = "an engine's precision is in its plan: export with --precision fp16 or bf16 and build that graph"
ENGINE: Mapping[str, Values] = {"device": ("cuda",), "mode": ("eager", "cuda_graph"), "streams": ANY, "flush_l2": ANY}
GRAPH = "an .onnx file or a model directory"


def _onnxruntime(provider: str) -> Variant:
    """ONNX Runtime by one of its execution providers."""
    on_gpu = provider != "cpu"
    own: dict[str, Values] = {"mode": ("eager", "cuda_graph"), "flush_l2": ANY} if on_gpu else {"threads": ANY}
    where = {"cpu": "on the CPU", "cuda": "on a GPU", "tensorrt": "through TensorRT"}[provider]
    return Variant(
        label=f"ONNX Runtime {where}",
        how=f"{GRAPH}, --provider {provider}",
        supported={
            "backend": ("onnxruntime",),
            "provider": (provider,),
            "device": ("cuda" if on_gpu else "cpu",),
            "mode": ("eager",),
            "streams": ANY,
            **own,
        },
        instead={"dtype": ON_GRAPHS, "device": "ONNX Runtime runs on a GPU with --provider cuda"},
    )


OPENVINO = Variant(
    label="OpenVINO on the CPU",
    how=f"{GRAPH}, --backend openvino",
    supported={
        "backend": ("openvino",),
        "device": ("cpu",),
        "dtype": ANY,
        "mode": ("eager",),
        "threads": ANY,
        "streams": ANY,
    },
    instead={"device": "OpenVINO is run on the CPU here"},
)

# By what runs the two models; `picks`: a model directory beside an engine needs its backend named.
BENCH = Axis(
    command="bench",
    picks=frozenset({"backend", "provider"}),
    variants={
        "torch-cpu": Variant(
            label="torch on the CPU",
            how="a model directory, --backend torch",
            supported={
                "backend": ("torch",),
                "device": ("cpu",),
                "dtype": ANY,
                "mode": ("eager", "compiled"),
                "threads": ANY,
                "streams": ANY,
            },
        ),
        "torch-cuda": Variant(
            label="torch on a GPU",
            how="a model directory, --backend torch --device cuda",
            supported={
                "backend": ("torch",),
                "device": ("cuda",),
                "dtype": ANY,
                "mode": ("eager", "compiled", "cuda_graph"),
                "streams": ANY,
                "flush_l2": ANY,
            },
        ),
        "aotinductor": Variant(
            label="a package of AOTInductor",
            how="a model directory, --backend aotinductor",
            supported={
                "backend": ("aotinductor",),
                "device": ("cpu",),
                "dtype": ANY,
                "mode": ("eager",),
                "threads": ANY,
                "streams": ANY,
            },
            instead={"mode": "it is compiled in any case", "device": "packages are compiled for the CPU here"},
        ),
        "aotinductor-file": Variant(
            label="a package that is handed over",
            how="a .pt2 of AOTInductor, --trust-code",
            supported={
                "backend": ("aotinductor",),
                "device": ("cpu",),
                "mode": ("eager",),
                "threads": ANY,
                "streams": ANY,
            },
            instead={"dtype": "a package is compiled in its precision"},
        ),
        "onnxruntime-cpu": _onnxruntime("cpu"),
        "onnxruntime-cuda": _onnxruntime("cuda"),
        "onnxruntime-tensorrt": _onnxruntime("tensorrt"),
        "openvino": OPENVINO,
        "tensorrt": Variant(
            label="TensorRT", how="a .plan of build --backend tensorrt", supported=ENGINE, instead={"dtype": OF_ENGINES}
        ),
        "tensorrt-rtx": Variant(
            label="TensorRT-RTX",
            how="a .plan of build --backend tensorrt-rtx",
            supported=ENGINE,
            instead={"dtype": OF_ENGINES},
        ),
    },
)

# By what is timed; how models are run is above.
BENCH_OF = Axis(
    command="bench",
    variants={
        "models": Variant(
            label="models",
            how="graphs, engines and directories of corp-deploy",
            supported=dict.fromkeys(("backend", "device", "provider", "mode", "dtype", "streams", "flush_l2"), ANY)
            | dict.fromkeys(("names", "images", "text"), ANY),
        ),
        "decoders": Variant(
            label="graphs of decoders",
            how="directories of export-decoder",
            supported={"backend": ("onnxruntime",), "provider": ("cpu", "cuda"), "length": ANY, "cached": ANY},
            instead={"device": "ONNX Runtime runs on a GPU with --provider cuda"},
        ),
    },
)

# The options of `build` by the names that export's options have.
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
    return Variant(
        label=words,
        how=f"--backend {backend}",
        supported={"precision": EVERY_WORD, "compatibility": COMPATIBILITIES[backend]}
        | {name: ANY for name, field in ENGINE_OPTIONS.items() if field not in refused},
        instead={name: refused[field] for name, field in ENGINE_OPTIONS.items() if field in refused}
        | {"device": "an engine is built for a GPU in any case"},
    )


def _graph_optimiser(device: str, words: str) -> Variant:
    # The CPU's kernels compute FP16 graphs in float32, and BF16 ones not at all.
    precision = WORDS[:1] if device == "cpu" else EVERY_WORD
    return Variant(
        label=words,
        how=f"--backend onnxruntime --device {device}",
        supported={"precision": precision, "device": (device,)},
        instead=dict.fromkeys(
            (*ENGINE_OPTIONS, "compatibility"), "the rest shapes engines, and an optimised graph takes any batch"
        ),
    )


BUILD = Axis(
    command="build",
    variants={
        "tensorrt": _engine_builder("tensorrt", "TensorRT"),
        "tensorrt-rtx": _engine_builder("tensorrt-rtx", "TensorRT-RTX"),
        "onnxruntime-cpu": _graph_optimiser("cpu", "ONNX Runtime on the CPU"),
        "onnxruntime-cuda": _graph_optimiser("cuda", "ONNX Runtime on a GPU"),
    },
)

AUDIT = Axis(
    command="audit",
    variants={
        "tensorrt": Variant(
            label="TensorRT", how="--backend tensorrt", supported={}, instead={"sm": REFUSALS["tensorrt"]["sms"]}
        ),
        "tensorrt-rtx": Variant(label="TensorRT-RTX", how="--backend tensorrt-rtx", supported={"sm": ANY}),
    },
)


def _mixed(name: str) -> Variant:
    return Variant(
        label=f"precision {name} with its sites named",
        how=f"--precision {name} without --auto",
        supported={"keep_fp32": ANY},
    )


def _mixed_by_search(name: str) -> Variant:
    return Variant(
        label=f"precision {name} that finds its sites",
        how=f"--precision {name} --auto --images P",
        supported=dict.fromkeys(("auto", "images", "text", "arrays", "samples", "seed", "dense", "engine"), ANY),
    )


_DRAWN: dict[str, Values] = dict.fromkeys(("images", "text", "arrays", "samples", "seed"), ANY)

_OF_RANGES: dict[str, Values] = dict.fromkeys(("rest", "scales", "balance", "keep_rest"), ANY)
# Where whole numbers are added up.
_OF_INT8: dict[str, Values] = {"weight_bits": ANY}


def _quantised(name: str, **more: Values) -> Variant:
    search = "auto" in more
    return Variant(
        label=f"precision {name}{' that finds its sites' * search}",
        how=f"--precision {name}{' --auto' * search} --images P",
        supported={**_DRAWN, **_OF_RANGES, **(_OF_INT8 if name == "int8" else {}), **more},
    )


# By precision; several may be at work at once.
EXPORT = Axis(
    command="export",
    picks=frozenset({"keep_fp32", "auto", "dense", "engine", *_DRAWN, *_OF_RANGES, *_OF_INT8}),
    variants={
        **{
            name: Variant(label=f"precision {name}", how=f"--precision {name}", supported={})
            for name, each in PRECISIONS.items()
            if not each.mixed
        },
        **{name: _mixed(name) for name in MIXED},
        **{f"{name}-auto": _mixed_by_search(name) for name in MIXED},
        **{name: _quantised(name) for name in QUANTISED},
        **{f"{name}-auto": _quantised(name, auto=ANY, dense=ANY, engine=ANY) for name in QUANTISED},
    },
)

# By the head geometry of the model itself.
EXPORT_HEADS = Axis(
    command="export",
    variants={
        "even": Variant(
            label="a model whose queries and values have one width", how="as trained, or square", supported={}
        ),
        "uneven": Variant(
            label="a model with queries narrower than its values", how="reduce --attn", supported={"heads": ANY}
        ),
    },
)

VERIFY = Axis(
    command="verify",
    variants={
        "images": Variant(
            label="real images",
            how="--images P or --text FILE",
            supported=dict.fromkeys(("labels", "moments", "samples", "seed", "hold_out", "groups"), ANY),
        ),
        "random": Variant(label="random inputs", how="--random N", supported={"seed": ANY}),
        "none": Variant(label="the inputs of a golden directory", how="verify golden B.plan", supported={}),
    },
)

_OF_NAMES = ("weights", "model_kwargs", "ema", "mean", "std", "crop_pct", "interpolation", "crop_mode", "outputs")
_OF_BOTH: dict[str, Values] = dict.fromkeys(
    ("images", "tokens", "arrays", "samples", "batch", "min_agreement", "metric", "metric_time_limit"), ANY
)
_OF_MODELS = (
    "head",
    "half_factor",
    "quantised_factor",
    "max_apart",
    "moments",
    "labels",
    "hold_out",
    "groups",
    "text",
    "trust_code",
    "runtime",
    "polygraphy",
)
# By what everything is held against.
VERIFY_REFERENCE = Axis(
    command="verify",
    variants={
        "model": Variant(
            label="a model as REFERENCE",
            how="verify DIR",
            supported=dict.fromkeys(_OF_NAMES + _OF_MODELS, ANY) | _OF_BOTH,
        ),
        "engine": Variant(
            label="an engine, a graph or a golden directory as REFERENCE",
            how="verify A.plan B.plan",
            supported={"write_golden": ANY, "other_graph": ANY} | _OF_BOTH,
        ),
        "decoder": Variant(
            label="a decoder's graph as CANDIDATES",
            how="verify DIR GRAPH --random 2, with a directory of export-decoder",
            supported={"length": ANY, "provider": ANY},
        ),
    },
)

_OF_MAPS: dict[str, Values] = {"map_threshold": ANY, "max_map_error": ANY, "min_iou": ANY, "min_pixels": ANY}
VERIFY_HEADS = Axis(
    command="verify",
    variants={
        "none": Variant(label="no head", how="no --head", supported={}),
        "some": Variant(label="a head", how="--head HEAD.onnx", supported=_OF_MAPS),
    },
)

CALIBRATE = Axis(
    command="calibrate",
    variants={
        "cpu": Variant(label="the CPU", how="--device cpu", supported={"dtype": ("float32", "bfloat16")}),
        "cuda": Variant(label="a GPU", how="--device cuda", supported={"dtype": ("float32", "bfloat16", "tf32")}),
    },
)

# By how much of the model is held.
CALIBRATE_BY = Axis(
    command="calibrate",
    variants={
        "whole": Variant(
            label="calibration in one pass",
            how="no --sequential",
            supported=dict.fromkeys(
                ("checkpoint_every", "snapshots", "groups", "attn", "align", "residual", "patch_memory"), ANY
            ),
        ),
        "blocks": Variant(
            label="--sequential",
            how="--sequential",
            supported={},
            instead={"checkpoint_every": "each block that is finished is kept"},
        ),
    },
)

# By what the model takes.
INPUTS = Axis(
    command="calibrate",
    variants={
        "images": Variant(
            label="images",
            how="--images P",
            supported={"images": ANY, "workers": ANY, "max_bad": ANY, "labels": ANY, "calibration_images": ANY},
        ),
        "text": Variant(
            label="text", how="--text FILE", supported={"text": ANY, "tokens": ANY, "calibration_text": ANY}
        ),
        "arrays": Variant(label="arrays", how="--arrays FILE", supported={"arrays": ANY}),
    },
)

AXES = (
    BENCH,
    BENCH_OF,
    BUILD,
    AUDIT,
    EXPORT,
    EXPORT_HEADS,
    VERIFY,
    VERIFY_HEADS,
    VERIFY_REFERENCE,
    CALIBRATE,
    CALIBRATE_BY,
    INPUTS,
)
