"""The table of which option of `reduce` and `sweep` is honoured by what of a reduction. Imports nothing heavy."""

from corp_deploy.polish.options import POLISHES
from corp_deploy.reduction.method import PRESETS, Method

from .option_support import ANY, Axis, Values, Variant

# What presets that merge channels are fitted to, in a sweep.
FITTED = ("calibration_images", "calibration_text")


def preset_way(name: str, method: Method) -> Variant:
    """What a method does to attention and convolutions, and whether it has the curves that a budget follows."""
    heads = ("padded", "ragged") if method.value_recovery == "keep" else ("padded", "ragged", "square", "auto")
    attention: dict[str, Values] = {} if method.qk_recovery == "keep" else {"attn": ANY, "heads": heads, "rotate": ANY}
    convolutions: dict[str, Values] = (
        {} if method.conv_recovery == "keep" else {"conv": ANY, "residual": ANY, "rescale": ANY}
    )
    whole_heads_option: dict[str, Values] = {} if method.heads_recovery == "keep" else {"whole_heads": ANY}
    parts = ("joint", "mlp", *(("attn",) if attention else ()), *(("conv",) if convolutions else ()))
    budgets = dict.fromkeys(("macs", "params", "latency", "within"), ANY) if method.has_curves else {}
    fitted = dict.fromkeys(FITTED, ANY) if method.merges else {}
    return Variant(
        label=f"preset {name}",
        how=f"--preset {name}",
        supported={"mlp": ANY, "parts": parts, **attention, **whole_heads_option, **convolutions, **budgets, **fitted},
    )


# By preset; a sweep has several at work, and the geometry is of those that touch attention.
PRESET = Axis(
    command="reduce",
    picks=frozenset({"heads", *FITTED}),
    variants={name: preset_way(name, method) for name, method in PRESETS.items()},
)

# By what happens to attention.
ATTENTION = Axis(
    command="reduce",
    variants={
        "kept": Variant(label="a reduction that leaves attention alone", how="--mlp or --conv alone", supported={}),
        "reduced": Variant(
            label="a reduction of attention",
            how="--attn above 0, a budget, --within or --heads auto",
            supported={"heads": ANY, "rotate": ANY, "qk": ANY},
        ),
    },
)

# By what settles the widths.
WIDTHS = Axis(
    command="reduce",
    variants={
        "sparsities": Variant(label="--mlp, --attn and --conv", how="--mlp 0.5 --attn 0.5", supported={}),
        "macs": Variant(label="a budget of MACs", how="--macs 0.6", supported={"most_cut": ANY}),
        "params": Variant(label="a budget of parameters", how="--params 0.6", supported={"most_cut": ANY}),
        "latency": Variant(
            label="a budget of latency",
            how="--latency 0.6 --latency-tables DIR",
            supported={"latency_tables": ANY, "batch": ANY},
        ),
        "within": Variant(
            label="a limit on what is lost",
            how="--within 'error 0.05'",
            supported={"latency_tables": ANY, "batch": ANY, "judge": ANY, "labels": ANY},
        ),
    },
)

# By whether anything looks at images.
IMAGES = Axis(
    command="reduce",
    variants={
        "none": Variant(label="a reduction from the moments alone", how="--mlp 0.5 --attn 0.5", supported={}),
        "images": Variant(
            label="what looks at images",
            how="a budget, --within, --heads auto, --closed-loop, --rescale, --polish, --sparse, or what is "
            "merged (presets grail-fold and fold, --select heads=fold)",
            supported=dict.fromkeys(
                ("images", "text", "arrays", "samples", "seed", "workers", "max_bad", "hold_out", "groups"), ANY
            ),
        ),
    },
)

# By which streams a block is repaired on.
LOOP = Axis(
    command="reduce",
    variants={
        "open": Variant(label="the open loop", how="no --closed-loop", supported={"rescale": ANY}),
        "asymmetric": Variant(
            label="the closed loop",
            how="--closed-loop",
            supported={"reads": ("all", "pooled")},
            instead={"rescale": "it fits what convolutions give already"},
        ),
        "symmetric": Variant(
            label="the symmetric closed loop",
            how="--closed-loop symmetric",
            supported={"rescale": ANY},
            instead={"reads": "it is fitted to nothing that is read behind the last block"},
        ),
    },
)

# By whether weights are set to zero.
SPARSE = Axis(
    command="reduce",
    variants={
        "none": Variant(label="a reduction that sets no weights to zero", how="no --sparse", supported={}),
        "sparse": Variant(
            label="sparse weights", how="--sparse 2:4", supported={"sparse_pattern": ANY, "sparse_permute": ANY}
        ),
    },
)

# By what of the reduced model is fitted by gradients.
POLISH = Axis(
    command="reduce",
    variants={
        name: Variant(
            label="a reduction that is not polished" if name == "none" else f"a polish of the {name}",
            how="no --polish" if name == "none" else f"--polish {name}",
            supported={} if name == "none" else {"polish_steps": ANY, "polish_time": ANY},
        )
        for name in POLISHES
    },
)
# By what becomes of tokens.
MERGING = Axis(
    command="reduce",
    variants={
        "none": Variant(label="a model that keeps its tokens", how="no --merge-tokens", supported={}),
        "merge": Variant(
            label="merged tokens",
            how="--merge-tokens 12",
            supported={"merge_metric": ANY, "merge_how": ANY, "merge_outputs": ANY},
        ),
        "drop": Variant(
            label="dropped tokens",
            how="--merge-tokens 12 --merge-how drop",
            supported={"merge_how": ANY},
            instead={"merge_outputs": "dropped tokens have no value to restore; merge them"},
        ),
    },
)

REDUCE = (PRESET, ATTENTION, WIDTHS, IMAGES, LOOP, POLISH, MERGING, SPARSE)
