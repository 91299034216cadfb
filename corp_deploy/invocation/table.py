"""The table of which backend honours which option, command by command. Imports nothing heavy."""

from collections.abc import Mapping

from export.engine.options import COMPATIBILITIES, REFUSALS
from ground.precision import EVERY_WORD, MIXED, PRECISIONS, QUANTISED, WORDS

from .honours import ANY, Axis, Values, Way

ON_GRAPHS = "a graph's precision is in its types: export it with --precision fp16 or bf16"
OF_ENGINES = "an engine's precision is in its plan: export with --precision fp16 or bf16 and build that graph"
ENGINE: Mapping[str, Values] = {"device": ("cuda",), "mode": ("eager", "cuda_graph"), "streams": ANY, "flush_l2": ANY}
GRAPH = "an .onnx file or a model directory"


def _onnxruntime(provider: str) -> Way:
    """ONNX Runtime by one of its execution providers."""
    on_gpu = provider != "cpu"
    own: dict[str, Values] = {"mode": ("eager", "cuda_graph"), "flush_l2": ANY} if on_gpu else {"threads": ANY}
    where = {"cpu": "on the CPU", "cuda": "on a GPU", "tensorrt": "through TensorRT"}[provider]
    return Way(
        words=f"ONNX Runtime {where}",
        ask=f"{GRAPH}, --provider {provider}",
        honours={
            "backend": ("onnxruntime",),
            "provider": (provider,),
            "device": ("cuda" if on_gpu else "cpu",),
            "mode": ("eager",),
            "streams": ANY,
            **own,
        },
        instead={"dtype": ON_GRAPHS, "device": "ONNX Runtime runs on a GPU with --provider cuda"},
    )


OPENVINO = Way(
    words="OpenVINO on the CPU",
    ask=f"{GRAPH}, --backend openvino",
    honours={
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
    ways={
        "torch-cpu": Way(
            words="torch on the CPU",
            ask="a model directory, --backend torch",
            honours={
                "backend": ("torch",),
                "device": ("cpu",),
                "dtype": ANY,
                "mode": ("eager", "compiled"),
                "threads": ANY,
                "streams": ANY,
            },
        ),
        "torch-cuda": Way(
            words="torch on a GPU",
            ask="a model directory, --backend torch --device cuda",
            honours={
                "backend": ("torch",),
                "device": ("cuda",),
                "dtype": ANY,
                "mode": ("eager", "compiled", "cuda_graph"),
                "streams": ANY,
                "flush_l2": ANY,
            },
        ),
        "aotinductor": Way(
            words="a package of AOTInductor",
            ask="a model directory, --backend aotinductor",
            honours={
                "backend": ("aotinductor",),
                "device": ("cpu",),
                "dtype": ANY,
                "mode": ("eager",),
                "threads": ANY,
                "streams": ANY,
            },
            instead={"mode": "it is compiled in any case", "device": "packages are compiled for the CPU here"},
        ),
        "aotinductor-file": Way(
            words="a package that is handed over",
            ask="a .pt2 of AOTInductor, --trust-code",
            honours={
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
        "tensorrt": Way(
            words="TensorRT", ask="a .plan of build --backend tensorrt", honours=ENGINE, instead={"dtype": OF_ENGINES}
        ),
        "tensorrt-rtx": Way(
            words="TensorRT-RTX",
            ask="a .plan of build --backend tensorrt-rtx",
            honours=ENGINE,
            instead={"dtype": OF_ENGINES},
        ),
    },
)

# By what is timed; how models are run is above.
BENCH_OF = Axis(
    command="bench",
    ways={
        "models": Way(
            words="models",
            ask="graphs, engines and directories of corp-deploy",
            honours=dict.fromkeys(("backend", "device", "provider", "mode", "dtype", "streams", "flush_l2"), ANY)
            | dict.fromkeys(("names", "images", "text"), ANY),
        ),
        "decoders": Way(
            words="graphs of decoders",
            ask="directories of export-decoder",
            honours={"backend": ("onnxruntime",), "provider": ("cpu", "cuda"), "length": ANY, "cached": ANY},
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


def _engine_builder(backend: str, words: str) -> Way:
    refused = REFUSALS[backend]
    return Way(
        words=words,
        ask=f"--backend {backend}",
        honours={"precision": EVERY_WORD, "compatibility": COMPATIBILITIES[backend]}
        | {name: ANY for name, field in ENGINE_OPTIONS.items() if field not in refused},
        instead={name: refused[field] for name, field in ENGINE_OPTIONS.items() if field in refused}
        | {"device": "an engine is built for a GPU in any case"},
    )


def _graph_optimiser(device: str, words: str) -> Way:
    # The CPU's kernels compute FP16 graphs in float32, and BF16 ones not at all.
    precision = WORDS[:1] if device == "cpu" else EVERY_WORD
    return Way(
        words=words,
        ask=f"--backend onnxruntime --device {device}",
        honours={"precision": precision, "device": (device,)},
        instead=dict.fromkeys(
            (*ENGINE_OPTIONS, "compatibility"), "the rest shapes engines, and an optimised graph takes any batch"
        ),
    )


BUILD = Axis(
    command="build",
    ways={
        "tensorrt": _engine_builder("tensorrt", "TensorRT"),
        "tensorrt-rtx": _engine_builder("tensorrt-rtx", "TensorRT-RTX"),
        "onnxruntime-cpu": _graph_optimiser("cpu", "ONNX Runtime on the CPU"),
        "onnxruntime-cuda": _graph_optimiser("cuda", "ONNX Runtime on a GPU"),
    },
)

AUDIT = Axis(
    command="audit",
    ways={
        "tensorrt": Way(
            words="TensorRT", ask="--backend tensorrt", honours={}, instead={"sm": REFUSALS["tensorrt"]["sms"]}
        ),
        "tensorrt-rtx": Way(words="TensorRT-RTX", ask="--backend tensorrt-rtx", honours={"sm": ANY}),
    },
)


def _mixed(name: str) -> Way:
    return Way(
        words=f"precision {name} with its sites named",
        ask=f"--precision {name} without --auto",
        honours={"keep_fp32": ANY},
    )


def _mixed_by_search(name: str) -> Way:
    return Way(
        words=f"precision {name} that finds its sites",
        ask=f"--precision {name} --auto --images P",
        honours=dict.fromkeys(("auto", "images", "text", "arrays", "samples", "seed", "dense", "engine"), ANY),
    )


_DRAWN: dict[str, Values] = dict.fromkeys(("images", "text", "arrays", "samples", "seed"), ANY)

_OF_RANGES: dict[str, Values] = dict.fromkeys(("rest", "scales", "balance", "keep_rest"), ANY)
# Where whole numbers are added up.
_OF_INT8: dict[str, Values] = {"weight_bits": ANY}


def _quantised(name: str, **more: Values) -> Way:
    search = "auto" in more
    return Way(
        words=f"precision {name}{' that finds its sites' * search}",
        ask=f"--precision {name}{' --auto' * search} --images P",
        honours={**_DRAWN, **_OF_RANGES, **(_OF_INT8 if name == "int8" else {}), **more},
    )


# By precision; several may be at work at once.
EXPORT = Axis(
    command="export",
    picks=frozenset({"keep_fp32", "auto", "dense", "engine", *_DRAWN, *_OF_RANGES, *_OF_INT8}),
    ways={
        **{
            name: Way(words=f"precision {name}", ask=f"--precision {name}", honours={})
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
    ways={
        "even": Way(words="a model whose queries and values have one width", ask="as trained, or square", honours={}),
        "uneven": Way(
            words="a model with queries narrower than its values", ask="reduce --attn", honours={"heads": ANY}
        ),
    },
)

VERIFY = Axis(
    command="verify",
    ways={
        "images": Way(
            words="real images",
            ask="--images P or --text FILE",
            honours=dict.fromkeys(("labels", "moments", "samples", "seed", "hold_out", "groups"), ANY),
        ),
        "random": Way(words="random inputs", ask="--random N", honours={"seed": ANY}),
        "none": Way(words="the inputs of a golden directory", ask="verify golden B.plan", honours={}),
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
    ways={
        "model": Way(
            words="a model as REFERENCE",
            ask="verify DIR",
            honours=dict.fromkeys(_OF_NAMES + _OF_MODELS, ANY) | _OF_BOTH,
        ),
        "engine": Way(
            words="an engine, a graph or a golden directory as REFERENCE",
            ask="verify A.plan B.plan",
            honours={"write_golden": ANY, "other_graph": ANY} | _OF_BOTH,
        ),
        "decoder": Way(
            words="a decoder's graph as CANDIDATES",
            ask="verify DIR GRAPH --random 2, with a directory of export-decoder",
            honours={"length": ANY, "provider": ANY},
        ),
    },
)

_OF_MAPS: dict[str, Values] = {"map_threshold": ANY, "max_map_error": ANY, "min_iou": ANY, "min_pixels": ANY}
VERIFY_HEADS = Axis(
    command="verify",
    ways={
        "none": Way(words="no head", ask="no --head", honours={}),
        "some": Way(words="a head", ask="--head HEAD.onnx", honours=_OF_MAPS),
    },
)

CALIBRATE = Axis(
    command="calibrate",
    ways={
        "cpu": Way(words="the CPU", ask="--device cpu", honours={"dtype": ("float32", "bfloat16")}),
        "cuda": Way(words="a GPU", ask="--device cuda", honours={"dtype": ("float32", "bfloat16", "tf32")}),
    },
)

# By how much of the model is held.
CALIBRATE_BY = Axis(
    command="calibrate",
    ways={
        "whole": Way(
            words="calibration in one pass",
            ask="no --sequential",
            honours=dict.fromkeys(
                ("checkpoint_every", "snapshots", "groups", "attn", "align", "residual", "patch_memory"), ANY
            ),
        ),
        "blocks": Way(
            words="--sequential",
            ask="--sequential",
            honours={},
            instead={"checkpoint_every": "each block that is finished is kept"},
        ),
    },
)

# By what the model takes.
INPUTS = Axis(
    command="calibrate",
    ways={
        "images": Way(
            words="images",
            ask="--images P",
            honours={"images": ANY, "workers": ANY, "max_bad": ANY, "labels": ANY, "calibration_images": ANY},
        ),
        "text": Way(words="text", ask="--text FILE", honours={"text": ANY, "tokens": ANY, "calibration_text": ANY}),
        "arrays": Way(words="arrays", ask="--arrays FILE", honours={"arrays": ANY}),
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
