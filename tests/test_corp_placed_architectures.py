"""Every architecture that timm builds as its Eva: what is reduced of which."""

import re
from collections import Counter
from typing import Any

import pytest
import timm
import torch
from torch import nn

from corp_deploy.families import timm_eva
from corp_deploy.families.family import sites_of, timm_family_of
from corp_deploy.families.timm_eva_blocks import with_placed_blocks

COUNTS = Counter(whole=54, partly=11)
"""Of Eva's names: with a site for every attention and MLP, with some refused."""
# Whose attentions or MLPs stay, with words of the reason.
PARTLY = {
    r"eva02_(base|large)_.*": "LayerNorm between the linear layers mixes all hidden channels",
    r"vit_(1b|5b|giant|huge|large)_patch16_sapiens2.*": r"heads share their keys and values",
}
TURNED = r"eva02_(tiny|small|base|large).*|vit_.*"
KEEPS_QK = r".*_sapiens2.*"
KEEPS_V = r"eva02_(base|large)_patch1[46]_clip.*"


def on_meta(name: str) -> nn.Module:
    """Two blocks where nothing is said block by block, without memory."""
    kwargs: dict[str, Any] = {} if "sapiens2" in name else {"depth": 2}
    with torch.device("meta"):
        return with_placed_blocks(timm.create_model(name, **kwargs))


@pytest.mark.slow("models")
def test_every_architecture_is_reduced_or_refused_with_a_reason() -> None:
    counts: Counter[str] = Counter()
    for name in timm.list_models(module="eva"):
        model = on_meta(name)
        assert timm_family_of(model).NAME == timm_eva.NAME
        offered = sites_of(model)
        words = next((reason for pattern, reason in PARTLY.items() if re.fullmatch(pattern, name)), None)
        assert (words is None) == (offered.refused == ()), name
        assert all(words is not None and words in refusal.reason for refusal in offered.refused), name
        assert len(offered.every) + len(offered.refused) == 2 * timm_eva.depth(model), name
        assert offered.every, name
        for site in offered.heads:
            assert (site.rotary is not None) == bool(re.fullmatch(TURNED, name)), name
            assert site.keeps_qk == bool(re.fullmatch(KEEPS_QK, name)), name
            assert site.keeps_v == bool(re.fullmatch(KEEPS_V, name)), name
        counts["whole" if words is None else "partly"] += 1
    assert counts == COUNTS


def test_the_table_names_what_there_is() -> None:
    known = timm.list_models(module="eva")
    for pattern in (*PARTLY, TURNED, KEEPS_QK, KEEPS_V):
        assert any(re.fullmatch(pattern, name) for name in known), pattern
