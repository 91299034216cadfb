"""A release as one TOML file: strict keys, everything checked before anything runs. Imports no torch."""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from corp_deploy.families.preprocessing import CROP_MODES, INTERPOLATIONS, Preprocessing
from corp_deploy.invocation.honours import Axis
from corp_deploy.invocation.table import ATTENTION, BENCH, LOOP, PRESET
from corp_deploy.reduction.method import (
    DEFAULT_RIDGE_REL,
    MLP_RANKINGS,
    NOT_HELD_OUT,
    PRESETS,
    QK_RANKINGS,
    Method,
    loop_from,
    method_from_preset,
)
from export.engine.options import BatchProfile, BuildOptions
from ground.errors import BadInput
from ground.files import regular
from ground.quantities import (
    ALIGNMENT,
    BAD_IMAGES,
    DEVIATION,
    ERROR,
    FACTOR,
    IMAGES,
    MEAN,
    MILLISECONDS,
    RIDGE,
    ROUNDS,
    SECONDS,
    SEED,
    SHARE,
    SHARE_KEPT,
    SHARE_REMOVED,
    THREADS,
    WORKERS,
)
from ground.quantity import BATCH, Quantity
from perf.gate.rule import Rule, rule_from_text

ENGINES = ("tensorrt", "tensorrt-rtx")
TARGETS = ("onnxruntime-cpu", "onnxruntime-cuda", *ENGINES)
HEADS = ("padded", "square", "ragged", "auto")
PRECISIONS = ("fp32", "fp16", "mixed")
_ABSENT = object()

Check = Callable[[Any], str | None]
"""What was expected of a value, or None when it will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a table. Without a default it must be given; a path is taken relative to the recipe."""

    check: Check
    default: Any = _ABSENT
    path: bool = False


def _text(value: object) -> str | None:
    return None if isinstance(value, str) and value.strip() else "a text that is not empty"


def _model_name(value: object) -> str | None:
    good = isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", value)
    return None if good else "letters, digits, '_', '.' and '-', starting with a letter or digit"


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _loop(value: object) -> str | None:
    good = isinstance(value, bool) or value == "symmetric"
    return None if good else "true, false or 'symmetric'"


def _table(value: object) -> str | None:
    return None if isinstance(value, dict) else "a table of arguments"


def _of(quantity: Quantity) -> Check:
    return lambda value: None if quantity.holds(value) else str(quantity)


def _word(*allowed: str) -> Check:
    def check(value: object) -> str | None:
        return None if value in allowed and isinstance(value, str) else f"one of {', '.join(allowed)}"

    return check


def _list(each: Check, words: str, *, empty: bool = False) -> Check:
    def check(value: object) -> str | None:
        if not isinstance(value, list) or not (value or empty):
            return words
        return None if all(each(item) is None for item in value) and len({*map(str, value)}) == len(value) else words

    return check


def _channels(quantity: Quantity) -> Check:
    def check(value: object) -> str | None:
        good = isinstance(value, list) and value and all(map(quantity.holds, value))
        return None if good else f"a list with {quantity} for all channels, or one for each"

    return check


_words = _list(_text, "a list of different texts", empty=True)
_batches = _list(_of(BATCH), f"a list of different whole numbers from {BATCH.low} to {BATCH.high}")

SECTIONS: Mapping[str, Mapping[str, Key]] = MappingProxyType(
    {
        "release": {"name": Key(check=_text, default=None)},
        "model": {
            "model": Key(check=_text),
            "weights": Key(check=_text, default=None, path=True),
            "kwargs": Key(check=_table, default={}),
            "ema": Key(check=_flag, default=None),
            "mean": Key(check=_channels(MEAN), default=None),
            "std": Key(check=_channels(DEVIATION), default=None),
            "crop_pct": Key(check=_of(SHARE_KEPT), default=None),
            "interpolation": Key(check=_word(*INTERPOLATIONS), default=None),
            "crop_mode": Key(check=_word(*CROP_MODES), default=None),
        },
        "calibration": {
            "images": Key(check=_text, path=True),
            "samples": Key(check=_of(IMAGES), default=None),
            "seed": Key(check=_of(SEED), default=0),
            "batch_size": Key(check=_of(BATCH), default=32),
            "device": Key(check=_word("cpu", "cuda"), default="cpu"),
            "workers": Key(check=_of(WORKERS), default=0),
            "max_bad": Key(check=_of(BAD_IMAGES), default=0),
            "hold_out": Key(check=_of(IMAGES), default=None),
            "attention_system": Key(check=_word("whole", "kept"), default=None),
        },
        "held_out": {
            "images": Key(check=_text, path=True),
            "labels": Key(check=_text, default=None, path=True),
            "samples": Key(check=_of(IMAGES), default=None),
            "seed": Key(check=_of(SEED), default=0),
        },
        "reduce": {
            "preset": Key(check=_word(*PRESETS), default="best"),
            "mlp": Key(check=_of(SHARE_REMOVED), default=None),
            "attn": Key(check=_of(SHARE_REMOVED), default=None),
            "macs": Key(check=_of(SHARE_KEPT), default=None),
            "params": Key(check=_of(SHARE_KEPT), default=None),
            "select_mlp": Key(check=_word(*MLP_RANKINGS), default=None),
            "select_head": Key(check=_word(*QK_RANKINGS), default=None),
            "heads": Key(check=_word(*HEADS), default="padded"),
            "align_mlp": Key(check=_of(ALIGNMENT), default=64),
            "align_head": Key(check=_of(ALIGNMENT), default=16),
            "ridge": Key(check=_of(RIDGE), default=DEFAULT_RIDGE_REL),
            "closed_loop": Key(check=_loop, default=False),
            "allow_partial": Key(check=_flag, default=False),
            "reads": Key(check=_word("all", "pooled"), default=None),
        },
        "export": {
            "precisions": Key(check=_list(_word(*PRECISIONS), "a list of fp32, fp16, mixed"), default=["fp32", "fp16"]),
            "keep_fp32": Key(check=_words, default=[]),
        },
        "parity": {
            "batches": Key(check=_batches, default=[1, 7, 32]),
            "min_agreement": Key(check=_of(SHARE), default=None),
            "max_error": Key(check=_of(ERROR), default=None),
            "half_factor": Key(check=_of(FACTOR), default=4.0),
        },
        "bench": {
            "batches": Key(check=_batches, default=[1, 8, 32]),
            "time_limit_s": Key(check=_of(SECONDS), default=20.0),
            "half_width": Key(check=_of(SHARE_KEPT), default=0.01),
            "block_ms": Key(check=_of(MILLISECONDS), default=25.0),
            "min_rounds": Key(check=_of(ROUNDS), default=16),
            "threads": Key(check=_of(THREADS), default=None),
        },
        "gate": {"fail_if": Key(check=_words, default=[])},
        "samples": {"count": Key(check=_of(IMAGES), default=16)},
        "package": {"name": Key(check=_model_name, default=None), "labels": Key(check=_text, default=None, path=True)},
    }
)
TARGET_KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "precision": Key(check=_word(*PRECISIONS), default=None),
        "batch": Key(check=_text, default=None),
        "sms": Key(check=_words, default=[]),
        "fail_if": Key(check=_words, default=[]),
    }
)
TABLES = (*SECTIONS, "targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One place where the model is to run; `profile` and `sms` shape engines only. `rules` are judged there alone."""

    name: str
    precision: str
    profile: BatchProfile
    sms: tuple[str, ...]
    rules: tuple[Rule, ...]

    @property
    def is_engine(self) -> bool:
        return self.name in ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A checked recipe. `tables` is all of it with defaults filled in and paths made absolute, targets among it."""

    name: str
    tables: Mapping[str, Mapping[str, Any]]
    targets: tuple[Target, ...]
    rules: tuple[Rule, ...]

    def __getitem__(self, table: str) -> Mapping[str, Any]:
        return self.tables[table]

    def path(self, table: str, key: str) -> Path:
        return Path(self.tables[table][key])

    def optional_path(self, table: str, key: str) -> Path | None:
        value = self.tables[table][key]
        return None if value is None else Path(value)

    @property
    def model_is_directory(self) -> bool:
        return Path(self.tables["model"]["model"]).is_absolute()

    @property
    def preprocessing(self) -> Preprocessing:
        """What of the preprocessing is set."""
        given = self.tables["model"]
        mean, std = (None if given[name] is None else tuple(given[name]) for name in ("mean", "std"))
        words = {name: given[name] for name in ("crop_pct", "interpolation", "crop_mode")}
        return Preprocessing(mean=mean, std=std, **words)

    @property
    def reduces_on_images(self) -> bool:
        """Whether the reduction looks at the calibration images beside their moments."""
        wanted = self.tables["reduce"]
        budget = wanted["macs"] is not None or wanted["params"] is not None
        return budget or wanted["heads"] == "auto" or bool(wanted["closed_loop"]) or self.method.merges

    @property
    def method(self) -> Method:
        """How sites are reduced; heads = auto starts from padded ones."""
        wanted = self.tables["reduce"]
        return method_from_preset(
            wanted["preset"],
            mlp_sparsity=wanted["mlp"],
            attention_sparsity=wanted["attn"],
            geometry="padded" if wanted["heads"] == "auto" else wanted["heads"],
            align_hidden=wanted["align_mlp"],
            align_head=wanted["align_head"],
            ridge_rel=wanted["ridge"],
            mlp_selection=wanted["select_mlp"],
            qk_selection=wanted["select_head"],
        )


def nearest(word: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    """A hint at what may have been meant."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


def _read(path: Path) -> dict[str, Any]:
    regular(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such recipe; write one with: corp-deploy release {path} --init MODEL") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: can't be read ({error})") from None
    except RecursionError:
        raise BadInput(f"{path}: not a recipe: its values are nested too deep") from None
    except ValueError as error:
        raise BadInput(f"{path}: not TOML: {error}") from None


def _refuse_unknown(where: str, given: Mapping[str, Any], known: Mapping[str, object] | tuple[str, ...]) -> None:
    for word in given:
        if word not in known:
            raise BadInput(f"{where}: unknown key {word!r}; {nearest(word, known)}")


def _model_text(base: Path, model: str) -> str:
    """A directory, relative to the recipe, as an absolute path; a timm name, and one that names a network, as it is."""
    model = model.removeprefix("local-dir:")
    beside = base / model
    if ":" in model and not beside.is_dir():
        return model
    return str(beside.resolve()) if "/" in model or beside.is_dir() else model


def _checked_table(
    path: Path, name: str, given: Any, keys: Mapping[str, Key], *, model: bool = False
) -> dict[str, Any]:
    """The given keys only, checked, with paths made absolute."""
    if not isinstance(given, dict):
        raise BadInput(f"{path}: {name} is {given!r}, expected a table: [{name}]")
    _refuse_unknown(f"{path}: [{name}]", given, keys)
    checked: dict[str, Any] = {}
    for word, value in given.items():
        expected = keys[word].check(value)
        if expected is not None:
            raise BadInput(f"{path}: {name}.{word} is {value!r}, expected {expected}")
        checked[word] = str((path.parent / value).resolve()) if keys[word].path else value
    if model and "model" in checked:
        checked["model"] = _model_text(path.parent, checked["model"])
    return checked


def _own_tables(path: Path, raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    _refuse_unknown(str(path), raw, ("extends", *TABLES))
    tables = {
        name: _checked_table(path, name, raw[name], keys, model=name == "model")
        for name, keys in SECTIONS.items()
        if name in raw
    }
    targets = raw.get("targets", {})
    if not isinstance(targets, dict):
        raise BadInput(f"{path}: targets is {targets!r}, expected tables such as [targets.onnxruntime-cpu]")
    _refuse_unknown(f"{path}: [targets]", targets, TARGETS)
    tables["targets"] = {
        name: _checked_table(path, f"targets.{name}", given, TARGET_KEYS) for name, given in targets.items()
    }
    return tables


def _with_bases(path: Path, seen: tuple[Path, ...]) -> dict[str, dict[str, Any]]:
    """The file's tables over those of the recipe it extends: tables are merged key by key, lists are replaced."""
    if path in seen:
        raise BadInput(f"{path}: extends itself by way of {' -> '.join(each.name for each in (*seen, path))}")
    raw = _read(path)
    own = _own_tables(path, raw)
    if "extends" not in raw:
        return own
    if _text(raw["extends"]) is not None:
        raise BadInput(f"{path}: extends is {raw['extends']!r}, expected the path of another recipe")
    merged = _with_bases((path.parent / raw["extends"]).resolve(), (*seen, path))
    for name, table in own.items():
        if name == "targets":
            for target, given in table.items():
                merged["targets"][target] = merged["targets"].get(target, {}) | given
        else:
            merged[name] = merged.get(name, {}) | table
    return merged


def _filled(path: Path, name: str, given: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
    missing = [word for word, key in keys.items() if key.default is _ABSENT and word not in given]
    if missing:
        raise BadInput(f"{path}: {name}.{missing[0]} is missing; write it under [{name}]")
    return {word: given.get(word, key.default) for word, key in keys.items()}


def _rules(path: Path, where: str, texts: list[str], batches: list[int]) -> tuple[Rule, ...]:
    try:
        rules = tuple(map(rule_from_text, texts))
    except BadInput as error:
        raise BadInput(f"{path}: {where}: {error}") from None
    for rule in rules:
        if rule.batch is not None and rule.batch not in batches:
            raise BadInput(f"{path}: {where}: {rule.text!r} asks for batch {rule.batch}, bench.batches has {batches}")
    return rules


def _target(path: Path, name: str, given: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> Target:
    where, batches, precisions = f"targets.{name}", tables["bench"]["batches"], tables["export"]["precisions"]
    half = "fp16" if "fp16" in precisions else precisions[-1]
    precision = given["precision"] or (half if name != "onnxruntime-cpu" else precisions[0])
    if precision not in precisions:
        raise BadInput(f"{path}: {where}.precision is {precision!r}, but export.precisions has {precisions}")
    if name not in ENGINES and (given["batch"] or given["sms"]):
        raise BadInput(f"{path}: {where}: batch and sms shape engines; leave them out for {name}")
    try:
        profile = BatchProfile.from_text(given["batch"] or f"1:{max(batches)}:{max(batches)}")
        if name in ENGINES:
            BuildOptions(backend=name, profiles=(profile,), sms=tuple(given["sms"]))
    except BadInput as error:
        raise BadInput(f"{path}: {where}: {error}") from None
    outside = [batch for batch in batches if not profile.smallest <= batch <= profile.largest]
    if name in ENGINES and outside:
        raise BadInput(f"{path}: {where}.batch is {profile}, but bench.batches asks for {outside[0]}")
    rules = _rules(path, f"{where}.fail_if", given["fail_if"], batches)
    if any(rule.wants_baseline for rule in rules):
        raise BadInput(f"{path}: {where}.fail_if: the baseline is one of the first target; put this rule under [gate]")
    return Target(name=name, precision=precision, profile=profile, sms=tuple(given["sms"]), rules=rules)


def _refuse_contradictions(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    wanted = tables["reduce"]
    budgets = [name for name in ("macs", "params") if wanted[name] is not None]
    if len(budgets) > 1:
        raise BadInput(f"{path}: [reduce] has macs and params; give one budget")
    if budgets and (wanted["mlp"] or wanted["attn"]):
        raise BadInput(f"{path}: [reduce] has a budget ({budgets[0]}) and sparsities (mlp, attn); give one of the two")
    if not budgets and wanted["mlp"] is None and wanted["attn"] is None and wanted["heads"] != "auto":
        raise BadInput(
            f"{path}: [reduce] asks for nothing; give mlp or attn a share to remove (0 keeps the widths), or a budget"
        )
    if budgets and wanted["preset"] != "best":
        raise BadInput(f"{path}: reduce.{budgets[0]} needs preset best, got {wanted['preset']!r}")
    loop = loop_from(wanted["closed_loop"])
    if tables["calibration"]["hold_out"] is not None and loop is not None:
        raise BadInput(
            f"{path}: calibration.hold_out judges sites that were fitted to moments; reduce.closed_loop: "
            f"{NOT_HELD_OUT[loop]}; give one of the two"
        )
    if tables["export"]["keep_fp32"] and "mixed" not in tables["export"]["precisions"]:
        raise BadInput(f"{path}: export.keep_fp32 is for precision mixed, which export.precisions does not have")
    if "mixed" in tables["export"]["precisions"] and not tables["export"]["keep_fp32"]:
        raise BadInput(f"{path}: precision mixed needs export.keep_fp32, such as ['blocks.7.attn']; else choose fp16")


def _refuse_ignored(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise BadInput for a key that neither the preset nor any of the targets would honour."""
    wanted = tables["reduce"]
    asks = any(wanted[name] is not None for name in ("attn", "macs", "params"))
    given = {"attn": wanted["attn"]} if wanted["attn"] is not None else {}
    given |= {"heads": wanted["heads"]} if wanted["heads"] != "padded" else {}
    given |= {"reads": wanted["reads"]} if wanted["reads"] is not None else {}
    asked: list[tuple[str, Axis, list[str], dict[str, Any]]] = [
        ("[reduce]", PRESET, [wanted["preset"]], given),
        ("[reduce]", ATTENTION, ["reduced" if asks or wanted["heads"] == "auto" else "kept"], given),
        ("[reduce]", LOOP, [loop_from(wanted["closed_loop"]) or "open"], given),
    ]
    # Threads are of the targets that have them; a recipe's other targets don't ask for any.
    deaf = [name for name in tables["targets"] if not BENCH.ways[name].takes("threads", 1)]
    if tables["bench"]["threads"] is not None and len(deaf) == len(tables["targets"]):
        asked.append(("[bench]", BENCH, deaf[:1], {"threads": tables["bench"]["threads"]}))
    for where, axis, ways, options in asked:
        try:
            axis.refuse([("", way) for way in ways], options)
        except BadInput as error:
            raise BadInput(f"{path}: {where}: {error}") from None


def _refuse_unservable(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    if tables["package"]["name"] is not None and "fp32" not in tables["export"]["precisions"]:
        raise BadInput(f"{path}: package.name asks for a model repository, which needs fp32 among export.precisions")


def _refuse_impossible_choices(path: Path, recipe: Recipe) -> None:
    try:
        _ = recipe.method
    except ValueError as error:
        raise BadInput(f"{path}: [reduce]: {error}") from None


def _refuse_idle_system(path: Path, recipe: Recipe) -> None:
    """Raise BadInput for a per-image system that nothing needs, or that would leave out what the reduction keeps."""
    asked, method = recipe["calibration"]["attention_system"], recipe.method
    given = f"{path}: calibration.attention_system is {asked!r}"
    if asked is not None and not method.needs_attention_system:
        raise BadInput(f"{given}, but this reduction needs no such system; leave it out, or give preset corp and attn")
    if asked == "kept" and not method.attention_sparsity:
        raise BadInput(f"{given}, but reduce.attn = 0 keeps every dimension; expected 'whole', or attn above 0")
    if asked == "kept" and method.qk_selection != "energy":
        raise BadInput(
            f"{given}, which is taken for the dimensions of most logit energy, but reduce.select_head is "
            f"{method.qk_selection!r}; expected 'whole', or select_head 'energy'"
        )


def load_recipe(path: Path) -> Recipe:
    """Read a recipe and what it extends. Raises BadInput, naming file and key, for anything that will not do.

    Whether the model and images exist is not asked here: see release.require_inputs.
    """
    path = path.resolve()
    given = _with_bases(path, ())
    tables: dict[str, Any] = {name: _filled(path, name, given.get(name, {}), keys) for name, keys in SECTIONS.items()}
    asked = given["targets"] or {"onnxruntime-cpu": {}}
    tables["targets"] = {name: _filled(path, f"targets.{name}", table, TARGET_KEYS) for name, table in asked.items()}
    tables["release"]["name"] = tables["release"]["name"] or path.stem
    _refuse_contradictions(path, tables)
    _refuse_ignored(path, tables)
    _refuse_unservable(path, tables)
    recipe = Recipe(
        name=tables["release"]["name"],
        tables=tables,
        targets=tuple(_target(path, name, table, tables) for name, table in tables["targets"].items()),
        rules=_rules(path, "gate.fail_if", tables["gate"]["fail_if"], tables["bench"]["batches"]),
    )
    _refuse_impossible_choices(path, recipe)
    _refuse_idle_system(path, recipe)
    return recipe
