"""What is done to sites, as a command, a recipe or a demo asks for it: a preset and what is set otherwise. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from corp_deploy.reduction.method import DEFAULT_RIDGE_REL, Method, method_from_preset
from ground.errors import BadInput

from .compositions import method_of
from .honours import Axis
from .reduction_table import PRESET, preset_way

ALIGN: Mapping[str, int] = MappingProxyType({"mlp": 64, "head": 16, "conv": 32})


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodChoice:
    """A preset with what is asked otherwise than it says; `mlp`, `attn`, `conv`, `residual` and `whole_heads` are
    shares to remove, in [0, 1).

    `select` ranks sites of a kind (mlp, head, conv, channels of MLPs and convolutions) or whole heads (heads) by
    something else, `repair` likewise repairs them, `qk` says what becomes of queries and keys, `align` has multiples
    of widths, `rescale` sets convolutions to the dense ones' means and variances, `rotate` gives reduced heads in
    a basis of even ranges, None as the preset does. Raises BadInput for a combination that makes no sense.
    """

    preset: str = "best"
    mlp: float | None = None
    attn: float | None = None
    conv: float | None = None
    residual: float | None = None
    whole_heads: float | None = None
    select: Mapping[str, str] | None = None
    repair: Mapping[str, str] | None = None
    qk: str | None = None
    heads: str = "padded"
    align: Mapping[str, int] = field(default_factory=lambda: ALIGN)
    ridge: float = DEFAULT_RIDGE_REL
    rescale: bool = False
    rotate: bool | None = None

    def __post_init__(self) -> None:
        try:
            _ = self.method
        except ValueError as error:
            raise BadInput(str(error)) from None

    @property
    def sparsities(self) -> tuple[float | None, ...]:
        """Shares to remove, None where nothing is said."""
        return self.mlp, self.attn, self.conv, self.residual, self.whole_heads

    @property
    def method(self) -> Method:
        """The method itself; heads `auto` start from padded ones."""
        return method_from_preset(
            method_of(self.preset),
            **self._knobs,
            mlp_sparsity=self.mlp,
            attention_sparsity=self.attn,
            conv_sparsity=self.conv,
            residual_sparsity=self.residual,
            heads_sparsity=self.whole_heads,
            geometry="padded" if self.heads == "auto" else self.heads,
            align_hidden=self.align.get("mlp"),
            align_head=self.align.get("head"),
            align_conv=self.align.get("conv"),
            aligned=self.align != ALIGN and "mlp" in self.align,
            ridge_rel=self.ridge,
            rescales=self.rescale,
            rotates=self.rotate,
        )

    @property
    def _knobs(self) -> dict[str, str | None]:
        """What of the preset is set by itself, by the fields of a method."""
        select, repair = self.select or {}, self.repair or {}
        return {
            "mlp_selection": select.get("mlp", select.get("channels")),
            "qk_selection": select.get("head"),
            "conv_selection": select.get("conv", select.get("channels")),
            "heads_selection": select.get("heads"),
            "mlp_recovery": repair.get("mlp", repair.get("channels")),
            "conv_recovery": repair.get("conv", repair.get("channels")),
            "heads_recovery": repair.get("heads"),
            "qk_recovery": self.qk,
        }

    @property
    def of_preset(self) -> tuple[Axis, str]:
        """What of the options of sites is honoured: by the preset as it is, or with what is set otherwise."""
        name = method_of(self.preset)
        changed = {field: value for field, value in self._knobs.items() if value is not None}
        if not changed:
            return PRESET, name
        words = f"{name} with {self._knob_words}"
        way = preset_way(words, method_from_preset(name, **changed))
        return replace(PRESET, ways={**PRESET.ways, words: way}), words

    @property
    def _knob_words(self) -> str:
        """As they are typed."""
        pairs = {
            "select": ",".join(f"{kind}={how}" for kind, how in (self.select or {}).items()),
            "repair": ",".join(f"{kind}={how}" for kind, how in (self.repair or {}).items()),
            "qk": self.qk,
        }
        return " ".join(f"--{option} {value}" for option, value in pairs.items() if value).replace("channels=", "")
