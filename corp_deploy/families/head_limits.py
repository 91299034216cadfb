"""What in an attention must stay as it is, by the norms that stand in it, and why. Knows no library."""

from torch import nn

KEEPS_QK = "q_norm / k_norm stand before the dot product, so head dimensions can't be mixed"


def keeps_qk(attention: nn.Module) -> str:
    """Why queries and keys must stay, or nothing."""
    norms = (attention.get_submodule(name) for name in ("q_norm", "k_norm"))
    return "" if all(isinstance(norm, nn.Identity) for norm in norms) else KEEPS_QK


def keeps_v(attention: nn.Module) -> str:
    """Why values must stay, or nothing."""
    norm = attention.get_submodule("norm")
    if isinstance(norm, nn.Identity):
        return ""
    return f"a {type(norm).__name__} before the output projection mixes all heads, so values can't be reduced"


def keeps_all(attention: nn.Module) -> str:
    """Why nothing of it can be reduced, or nothing."""
    qk, v = keeps_qk(attention), keeps_v(attention)
    return f"{qk}, and {v}" if qk and v else ""
