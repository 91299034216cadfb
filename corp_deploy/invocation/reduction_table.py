"""Tables of the options of `reduce` and `sweep` that have an effect with a preset, a budget, a loop and so on.

See option_support for the tables' types. Imports nothing heavy.
"""

from corp_deploy.reduction.method import PRESETS, Method

from .option_support import Axis, Variant, variant

# The options of `sweep` for the inputs that presets with merged channels are fitted to.
FITTED = ("calibration_images", "calibration_text")


def preset_way(name: str, method: Method) -> Variant:
    """Return a preset's row of PRESET: the widths, budgets and other options that have an effect with `method`.

    Budgets need a method with curves, and options of attention, convolutions and heads one that reduces those.
    """
    attention, convolutions = method.qk_recovery != "keep", method.conv_recovery != "keep"
    square = "" if method.value_recovery == "keep" else ",square,auto"
    parts = ",".join(("joint", "mlp", *["attn"] * attention, *["conv"] * convolutions))
    names = ["mlp", f"parts={parts}"]
    names += ["attn", "rotate", f"heads=padded,ragged{square}"] * attention
    names += ["conv", "residual", "rescale"] * convolutions + ["whole_heads"] * (method.heads_recovery != "keep")
    names += ["macs", "params", "latency", "within"] * method.has_curves + [*FITTED] * method.merges
    return variant(f"preset {name}", f"--preset {name}", " ".join(names))


# Presets. A sweep uses several; --heads and the inputs in FITTED need only one preset that honours them.
PRESET = Axis(
    picks=frozenset({"heads", *FITTED}),
    variants={name: preset_way(name, method) for name, method in PRESETS.items()},
)

# Reductions with and without attention.
ATTENTION = Axis(
    variants={
        "kept": variant("a reduction that leaves attention alone", "--mlp or --conv alone"),
        "reduced": variant(
            "a reduction of attention", "--attn above 0, a budget, --within or --heads auto", "heads rotate qk"
        ),
    },
)

# The ways that widths are chosen.
WIDTHS = Axis(
    variants={
        "sparsities": variant("--mlp, --attn and --conv", "--mlp 0.5 --attn 0.5"),
        "macs": variant("a budget of MACs", "--macs 0.6", "most_cut"),
        "params": variant("a budget of parameters", "--params 0.6", "most_cut"),
        "latency": variant("a budget of latency", "--latency 0.6 --latency-tables DIR", "latency_tables batch"),
        "within": variant("a limit on what is lost", "--within 'error 0.05'", "latency_tables batch judge labels"),
    },
)

# Reductions with and without images.
IMAGES = Axis(
    variants={
        "none": variant("a reduction from the moments alone", "--mlp 0.5 --attn 0.5"),
        "images": variant(
            "a reduction that reads images",
            "a budget, --within, --heads auto, --closed-loop, --effort, --rescale, --polish, --sparse, or merged "
            "channels or heads (presets grail-fold and fold, --select heads=fold)",
            "images text arrays samples seed workers max_bad hold_out groups",
        ),
    },
)

# The inputs that blocks are fitted on: those of the dense model (open), or of the model reduced so far.
LOOP = Axis(
    variants={
        "open": variant("the open loop", "no --closed-loop", "rescale"),
        "asymmetric": variant(
            "the closed loop",
            "--closed-loop",
            "reads=all,pooled",
            {"rescale": "the closed loop already fits the outputs of convolutions"},
        ),
        "symmetric": variant(
            "the symmetric closed loop",
            "--closed-loop symmetric",
            "rescale",
            {"reads": "the symmetric loop fits sites to their dense weights, whatever tokens the outputs read"},
        ),
    },
)

# Reductions with and without sparse weights.
SPARSE = Axis(
    variants={
        "none": variant("a reduction that sets no weights to zero", "no --sparse"),
        "sparse": variant("sparse weights", "--sparse 2:4", "sparse_pattern sparse_permute"),
    },
)

# Reductions with and without a polish.
POLISH = Axis(
    variants={
        "none": variant("a reduction that is not polished", "no --polish"),
        "layer": variant("a polish", "--polish layer", "polish_steps polish_time"),
    },
)

# The ways that tokens are merged.
MERGING = Axis(
    variants={
        "none": variant("a model that keeps its tokens", "no --merge-tokens"),
        "merge": variant("merged tokens", "--merge-tokens 12", "merge_metric merge_how merge_outputs"),
        "drop": variant(
            "dropped tokens",
            "--merge-tokens 12 --merge-how drop",
            "merge_how",
            {"merge_outputs": "dropped tokens have no value to restore; merge them"},
        ),
        "mlp": variant(
            "tokens merged for MLPs alone",
            "--merge-tokens 30% --merge-how mlp",
            "merge_how",
            {"merge_outputs": "every token keeps a value of its own"},
        ),
    },
)
