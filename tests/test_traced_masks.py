"""Traced models that take a mask beside ids: taken apart with it, and fitted to the tokens that are there alone."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from calib.inputs import InputSet, run_model, tensors_by_name
from corp_deploy.algebra.sparsity import Sparsity
from corp_deploy.families.traced_model import steps, tracing
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.polish.segments import segment_sublayer
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.sparsify import Sparsifying, sparsified
from corp_deploy.reduction.streams import Pair
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.inputs import texts_for_model
from corp_deploy.store.transformers_directory import load_transformers
from corp_deploy.traced.finding.cuts import along, between, cuts
from corp_deploy.traced.models.segments import TokenRows
from corp_deploy.traced.models.steps import SegmentStep
from tests import encoders

HALF = method_from_preset("best", mlp_sparsity=0.5, attention_sparsity=0.5, align_hidden=8, align_head=4)
SHORT, LONG = 18, 30
"""Tokens: no text has more than the first."""


def loaded(home: Path, length: int) -> tuple[Checkpoint, InputSet]:
    """An encoder, with texts that are padded to this length."""
    if not (home / "hf").exists():
        encoders.write_encoder(home / "hf")
        words = " ".join(encoders.TEXTS).split()
        texts = [" ".join(words[at : at + 1 + at % 3]) for at in range(32)]
        (home / "texts.txt").write_text("\n".join(texts))
    checkpoint = load_transformers(home / "hf", {"length": length})
    return checkpoint, texts_for_model(checkpoint.model, home / "texts.txt")


def test_segments_with_the_mask_are_the_program(tmp_path: Path) -> None:
    checkpoint, texts = loaded(tmp_path, SHORT)
    model, (tokens, *_) = checkpoint.model, texts.batches(5)
    own = tracing(model)
    at = [None, *(cut.node for cut in cuts(own.analysis)), None]
    assert [node.name for node in along(own.program)] == ["attention_mask"]
    x, mask = tensors_by_name(tokens).values()
    assert not bool(mask.all())
    with torch.no_grad():
        for before, after in pairwise(at):
            x = between(own.program, before, after)(x, mask)
        torch.testing.assert_close(x, run_model(model, tokens))
    *blocks, pooling = own.segments
    assert [segment.name for segment in blocks] == [f"blocks.{at}.{name}" for at in (0, 1) for name in ("attn", "mlp")]
    assert pooling.weights == {"blocks.1.norm2.weight", "blocks.1.norm2.bias"}


def looped(dense: Checkpoint, texts: InputSet) -> nn.Module:
    return reduce_traced(dense.model, texts, HALF, loop=Loop()).model


def with_blocks_polished(dense: Checkpoint, texts: InputSet) -> nn.Module:
    model = reduce(dense.model, calibrate(dense, texts, batch_size=8), HALF).model
    return polished(dense.model, model, texts, PolishOptions(how="block", steps=3, batch_size=4)).model


def made_sparse(dense: Checkpoint, texts: InputSet) -> nn.Module:
    kinds = Sparsifying(kinds={"head": Sparsity(kept=2, of=4), "mlp": Sparsity(kept=2, of=4)}, permute="none")
    return sparsified(dense.model, texts, kinds)[0]


def folded(dense: Checkpoint, texts: InputSet) -> nn.Module:
    how = method_from_preset("fold", mlp_sparsity=0.5, align_hidden=8)
    return reduce(dense.model, calibrate(dense, texts, batch_size=8), how, images=texts).model


@pytest.mark.parametrize("lever", [looped, with_blocks_polished, made_sparse, folded])
def test_more_padding_changes_no_fit(lever: Callable[[Checkpoint, InputSet], nn.Module], tmp_path: Path) -> None:
    """The same answers where the texts are padded to more tokens."""
    answers = list[Tensor]()
    for length in (SHORT, LONG):
        dense, texts = loaded(tmp_path, length)
        reduced = lever(dense, texts)
        with torch.inference_mode():
            own, asked = (
                torch.cat([run_model(each, batch) for batch in texts.batches(8)]) for each in (reduced, dense.model)
            )
        assert float((own - asked).norm()) > 0.01 * float(asked.norm())
        answers.append(own)
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_tokens_that_are_not_there_weigh_nothing(tmp_path: Path) -> None:
    """What layers lack is weighted by the mask."""
    checkpoint, _ = loaded(tmp_path, SHORT)
    model = checkpoint.model
    mask_BN = (torch.arange(SHORT) < torch.tensor([[SHORT], [4]])).float()
    for step in steps(model):
        assert isinstance(step, SegmentStep)
        assert isinstance(step.module, TokenRows)
        x_BNC: Tensor = torch.randn(2, SHORT, 32, generator=torch.Generator().manual_seed(0))
        if step.name == "blocks.0.attn":
            x_BNC = torch.ones(2, 1, SHORT, dtype=torch.int64)
        given = step.module(x_BNC, mask_BN)
        pair = Pair(dense=given, reduced=x_BNC, held_out=False, weights_BN=mask_BN)
        for of_layer in segment_sublayer(model, step).steps:
            (piece,) = of_layer.linearised([pair])
            assert piece.weight_X is not None
            assert torch.equal(piece.weight_X, mask_BN.flatten())
            torch.testing.assert_close(piece.residual_XO, torch.zeros_like(piece.residual_XO), atol=1e-5, rtol=0.0)
