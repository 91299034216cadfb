"""The table of which option of `reduce` and `sweep` is honoured by what of a reduction. Imports nothing heavy."""

from corp_deploy.polish.options import POLISHES
from corp_deploy.reduction.method import PRESETS, Method

from .honours import ANY, Axis, Values, Way

# What presets that merge channels are fitted to, in a sweep.
FITTED = ("calibration_images", "calibration_text")


def preset_way(name: str, method: Method) -> Way:
    """What a method does to attention and convolutions, and whether it has the curves that a budget follows."""
    heads = ("padded", "ragged") if method.value_recovery == "keep" else ("padded", "ragged", "square", "auto")
    attention: dict[str, Values] = {} if method.qk_recovery == "keep" else {"attn": ANY, "heads": heads, "rotate": ANY}
    convolutions: dict[str, Values] = (
        {} if method.conv_recovery == "keep" else {"conv": ANY, "residual": ANY, "rescale": ANY}
    )
    whole: dict[str, Values] = {} if method.heads_recovery == "keep" else {"whole_heads": ANY}
    parts = ("joint", "mlp", *(("attn",) if attention else ()), *(("conv",) if convolutions else ()))
    budgets = dict.fromkeys(("macs", "params", "latency", "within"), ANY) if method.has_curves else {}
    fitted = dict.fromkeys(FITTED, ANY) if method.merges else {}
    return Way(
        words=f"preset {name}",
        ask=f"--preset {name}",
        honours={"mlp": ANY, "parts": parts, **attention, **whole, **convolutions, **budgets, **fitted},
    )


# By preset; a sweep has several at work, and the geometry is of those that touch attention.
PRESET = Axis(
    command="reduce",
    picks=frozenset({"heads", *FITTED}),
    ways={name: preset_way(name, method) for name, method in PRESETS.items()},
)

# By what happens to attention.
ATTENTION = Axis(
    command="reduce",
    ways={
        "kept": Way(words="a reduction that leaves attention alone", ask="--mlp or --conv alone", honours={}),
        "reduced": Way(
            words="a reduction of attention",
            ask="--attn above 0, a budget, --within or --heads auto",
            honours={"heads": ANY, "rotate": ANY, "qk": ANY},
        ),
    },
)

# By what settles the widths.
WIDTHS = Axis(
    command="reduce",
    ways={
        "sparsities": Way(words="--mlp, --attn and --conv", ask="--mlp 0.5 --attn 0.5", honours={}),
        "macs": Way(words="a budget of MACs", ask="--macs 0.6", honours={"most_cut": ANY}),
        "params": Way(words="a budget of parameters", ask="--params 0.6", honours={"most_cut": ANY}),
        "latency": Way(
            words="a budget of latency",
            ask="--latency 0.6 --latency-tables DIR",
            honours={"latency_tables": ANY, "batch": ANY},
        ),
        "within": Way(
            words="a limit on what is lost",
            ask="--within 'error 0.05'",
            honours={"latency_tables": ANY, "batch": ANY, "judge": ANY, "labels": ANY},
        ),
    },
)

# By whether anything looks at images.
IMAGES = Axis(
    command="reduce",
    ways={
        "none": Way(words="a reduction from the moments alone", ask="--mlp 0.5 --attn 0.5", honours={}),
        "images": Way(
            words="what looks at images",
            ask="a budget, --within, --heads auto, --closed-loop, --rescale, --polish, --sparse, or what is "
            "merged (presets grail-fold and fold, --select heads=fold)",
            honours=dict.fromkeys(
                ("images", "text", "arrays", "samples", "seed", "workers", "max_bad", "hold_out", "groups"), ANY
            ),
        ),
    },
)

# By which streams a block is repaired on.
LOOP = Axis(
    command="reduce",
    ways={
        "open": Way(words="the open loop", ask="no --closed-loop", honours={"rescale": ANY}),
        "asymmetric": Way(
            words="the closed loop",
            ask="--closed-loop",
            honours={"reads": ("all", "pooled")},
            instead={"rescale": "it fits what convolutions give already"},
        ),
        "symmetric": Way(
            words="the symmetric closed loop",
            ask="--closed-loop symmetric",
            honours={"rescale": ANY},
            instead={"reads": "it is fitted to nothing that is read behind the last block"},
        ),
    },
)

# By whether weights are set to zero.
SPARSE = Axis(
    command="reduce",
    ways={
        "none": Way(words="a reduction that sets no weights to zero", ask="no --sparse", honours={}),
        "sparse": Way(
            words="sparse weights",
            ask="--sparse 2:4",
            honours={"sparse_pattern": ANY, "sparse_permute": ANY},
        ),
    },
)

# By what of the reduced model is fitted by gradients.
POLISH = Axis(
    command="reduce",
    ways={
        name: Way(
            words="a reduction that is not polished" if name == "none" else f"a polish of the {name}",
            ask="no --polish" if name == "none" else f"--polish {name}",
            honours={} if name == "none" else {"polish_steps": ANY, "polish_time": ANY},
        )
        for name in POLISHES
    },
)
# By what becomes of tokens.
MERGING = Axis(
    command="reduce",
    ways={
        "none": Way(words="a model that keeps its tokens", ask="no --merge-tokens", honours={}),
        "merge": Way(
            words="merged tokens",
            ask="--merge-tokens 12",
            honours={"merge_metric": ANY, "merge_how": ANY, "merge_outputs": ANY},
        ),
        "drop": Way(
            words="dropped tokens",
            ask="--merge-tokens 12 --merge-how drop",
            honours={"merge_how": ANY},
            instead={"merge_outputs": "dropped tokens have no value to restore; merge them"},
        ),
    },
)

REDUCE = (PRESET, ATTENTION, WIDTHS, IMAGES, LOOP, POLISH, MERGING, SPARSE)
