"""Token merging as commands and recipes ask for it, and what inspect says of a model that merges."""

from typing import Any

import pytest

from corp_deploy.families import traced_model
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.merging import merging_from_choice
from corp_deploy.release.recipe_tables import ReduceTable
from corp_deploy.traced.models.merging import Merging
from corp_deploy.traced.models.parts import tokens_that_enter
from ground.errors import BadInput
from tests.tiny import checkpoint


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"merge_tokens": "3"}, Merging(schedule=(3, 3))),
        ({"merge_tokens": "100"}, Merging(schedule=(8, 4))),
        ({"merge_tokens": "2,4", "merge_metric": "keys"}, Merging(schedule=(2, 4), metric="keys")),
        ({"merge_tokens": "grow:4", "merge_outputs": "unmerged"}, Merging(schedule=(0, 4), unmerged=True)),
        ({"merge_tokens": "100", "merge_how": "drop"}, Merging(schedule=(15, 0), how="drop")),
    ],
)
def test_what_options_and_recipes_ask_for(options: dict[str, Any], expected: Merging) -> None:
    model = checkpoint().model
    assert merging_from_choice(ReduceOptions.from_options(options), model) == expected
    assert merging_from_choice(ReduceTable(**options).choice, model) == expected


def test_merging_alone_repairs_at_full_width_in_a_closed_loop_and_nothing_without() -> None:
    asked = {"merge_tokens": "3"}
    method = ReduceOptions.from_options(asked).method_asked
    assert (method.mlp_sparsity, method.attention_sparsity) == (None, None)
    method = ReduceOptions.from_options(asked | {"closed_loop": True}).method_asked
    assert (method.mlp_sparsity, method.attention_sparsity) == (0.0, 0.0)
    method = ReduceOptions.from_options(asked | {"closed_loop": True, "mlp": 0.5}).method_asked
    assert (method.mlp_sparsity, method.attention_sparsity) == (0.5, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mlp": 0.5, "merge_metric": "keys"}, "--merge-metric keys is not honoured by a model that keeps its tokens"),
        ({"merge_tokens": "3", "merge_how": "drop", "merge_metric": "keys"}, "is not honoured by dropped tokens"),
        ({"merge_tokens": "3", "merge_how": "drop", "merge_outputs": "unmerged"}, "no value to restore"),
        (
            {"merge_tokens": "3", "preset": "fold", "mlp": 0.5},
            "merges channels or heads by tokens that all count alike",
        ),
    ],
)
def test_options_that_nothing_honours_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        ReduceOptions.from_options(options).refuse_ignored(options)
    with pytest.raises(BadInput):
        ReduceTable(**options)


def test_inspect_counts_at_the_tokens_that_reach_a_site_and_what_merging_costs() -> None:
    dense, schedule = checkpoint().model, (3, 4)
    model = traced_model.with_merging(dense, Merging(schedule=schedule))
    said = inspection_of_model(model)
    macs = {row["site"]: row["macs"] for row in said["sites"]} | {row["name"]: row["macs"] for row in said["fixed"]}
    assert said["merging"].items() >= (Merging(schedule=schedule).as_json() | {"schedule": schedule}).items()
    assert said["merging"]["tokens"] == (17, 14, 10)
    assert macs["blocks.0.mlp"] == 2 * 14 * 48 * 192
    assert macs["blocks.1.mlp"] == 2 * 10 * 48 * 192
    assert macs["blocks.1.attn.qk"] + macs["blocks.1.attn.v"] == 14 * 48 * 4 * 48 + 2 * 3 * 14 * 14 * 16
    # Similarities of 8 even and 8 odd tokens, then 3 tokens into 8; behind the next block of 7 and 6, 4 into 6.
    assert said["merging"]["macs_of_merging"] == 48 * (8 * 8 + 8 * 3 + 7 * 6 + 6 * 4)
    assert sum(macs.values()) == said["macs"] < inspection_of_model(dense)["macs"]
    reach = {0: {"attn.qk": 17, "attn.v": 17, "mlp": 14}, 1: {"attn.qk": 14, "attn.v": 14, "mlp": 10}}
    assert tokens_that_enter(model) == {
        f"blocks.{at}.{part}": n for at, own in reach.items() for part, n in own.items()
    }
