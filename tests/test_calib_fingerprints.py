"""Digests and perceptual hashes of inputs, and the overlap of sets that they show."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.fft import dctn
from torch import Tensor

from calib.combination import merge_moments, moments_without
from calib.fingerprints import ALIKE, BITS, Fingerprints, are_alike, perceptual_hashes
from calib.fingerprints_text import FingerprintsText
from ground.errors import BadInput
from tests.test_calib_store import moments


def photographs(count: int, seed: int = 0) -> Tensor:
    """Return noise with the spectrum of photographs, scaled to 0 to 1, [count, 3, 96, 96]."""
    noise = torch.randn(count, 3, 96, 96, generator=torch.Generator().manual_seed(seed))
    away = torch.fft.fftfreq(96)[:, None].square() + torch.fft.rfftfreq(96)[None].square()
    images = torch.fft.irfft2(torch.fft.rfft2(noise) / (away.sqrt() + 0.02))
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    scaled: Tensor = (images - low) / (high - low)
    return scaled


def saved_again(images: Tensor, quality: int) -> Tensor:
    again = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
        again.append(torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255)
    return torch.stack(again)


def test_bits_are_the_signs_of_the_lowest_frequencies() -> None:
    image = photographs(1)[0]
    grey = image.double().mean(0).reshape(32, 3, 32, 3).mean((1, 3)).numpy()
    lowest = dctn(grey, type=2)[:12, :12].flatten()[1 : BITS + 1]
    expected = lowest > np.sort(lowest)[BITS // 2 - 1]
    (hashes,) = perceptual_hashes(image[None])
    assert [bool(int(word) >> place & 1) for word in hashes for place in range(64)] == expected.tolist()


def test_resaved_pictures_are_near_duplicates_and_others_are_not() -> None:
    images = photographs(64)
    hashes = perceptual_hashes(images)
    for quality, least in ((95, 0.9), (75, 0.75)):
        again = perceptual_hashes(2.0 * saved_again(images, quality) - 0.3)
        assert are_alike(again, hashes).float().mean() >= least, quality
    assert not are_alike(perceptual_hashes(photographs(64, seed=1)), hashes).any()
    smaller = torch.nn.functional.interpolate(images, size=64, mode="bilinear", antialias=True)
    assert are_alike(perceptual_hashes(smaller), hashes).float().mean() >= 0.9


def test_hash_is_independent_of_the_batch_and_of_symmetry() -> None:
    images = torch.cat([photographs(3), torch.zeros(1, 3, 96, 96)])
    mirrored = images + images.flip(3)
    for each in (images, mirrored):
        alone = torch.cat([perceptual_hashes(one[None]) for one in each])
        assert torch.equal(perceptual_hashes(each), alone)


def test_near_duplicate_threshold_is_exact() -> None:
    one = torch.tensor([[0, -1]])
    for flipped, alike in ((ALIKE, True), (ALIKE + 1, False)):
        other = torch.tensor([[(1 << flipped) - 1, -1]])
        assert are_alike(other, one).tolist() == [alike]
    assert not are_alike(one, torch.empty(0, 2, dtype=torch.int64)).any()
    assert are_alike(torch.empty(0, 2, dtype=torch.int64), one).tolist() == []


def test_known_images_are_found_by_content_and_by_hash() -> None:
    images = photographs(6)
    fitted = Fingerprints.from_inputs(torch.arange(4), images[:4])
    # Two known digests, a known image under another digest, and an unknown image.
    judging = Fingerprints.from_inputs(torch.tensor([0, 1, 77, 78]), torch.cat([images[:3], images[5:]]))
    assert judging.overlap(fitted) == (2, 1)
    assert judging.overlap(Fingerprints(ids=fitted.ids)) == (2, 0)
    assert judging.overlap(Fingerprints()) == (0, 0)
    texts = Fingerprints.from_inputs(torch.tensor([1, 9]), {"input_ids": torch.zeros(2, 5)})
    assert texts.overlap(fitted) == (1, 0)


def test_fingerprints_are_stored_with_hashed_ones_first() -> None:
    hashed = Fingerprints.from_inputs(torch.tensor([5, -3]), photographs(2))
    plain = Fingerprints(ids=torch.tensor([2**62]))
    both = Fingerprints.concatenated([plain, hashed])
    assert both.ids.tolist() == [5, -3, 2**62]
    again = FingerprintsText(**both.as_json()).fingerprints
    assert torch.equal(again.ids, both.ids)
    assert torch.equal(again.hashes_M2, hashed.hashes_M2)
    assert not len(Fingerprints.concatenated([]))
    slashes = Fingerprints(ids=torch.tensor([-1, -(2**48)])).as_json()["ids"]
    assert "/" not in slashes
    assert "_" in slashes, "base64 for URLs has _ in place of /"
    assert hashed.sorted().ids.tolist() == [-3, 5]
    assert torch.equal(hashed.sorted().hashes_M2, hashed.hashes_M2.flip(0))


@pytest.mark.parametrize(("ids", "hashes"), [("!", ""), ("AAAA", ""), ("", "A" * 21 + "=="), ("A" * 11 + "=", "AA==")])
def test_malformed_fingerprint_texts_are_refused(ids: str, hashes: str) -> None:
    with pytest.raises(BadInput, match="fingerprints"):
        _ = FingerprintsText(ids=ids, hashes=hashes).fingerprints


def test_merging_and_splitting_moments_keeps_hashes_with_their_images() -> None:
    one, other = moments(ids=(3, 8)), moments(1, ids=(5, 6))
    hashes = [each.image_ids[:, None].repeat(1, 2) for each in (one, other)]
    marked = [
        replace(each, fingerprints=Fingerprints(ids=each.image_ids, hashes_M2=own))
        for each, own in zip((one, other), hashes, strict=True)
    ]
    whole = merge_moments(*marked)
    assert whole.image_ids.tolist() == [3, 5, 6, 8]
    assert whole.fingerprints.hashes_M2[:, 0].tolist() == [3, 5, 6, 8]
    assert not len(merge_moments(marked[0], other).fingerprints.hashes_M2)
    left = moments_without(whole, marked[1])
    assert (left.image_ids.tolist(), left.fingerprints.hashes_M2[:, 1].tolist()) == ([3, 8], [3, 8])
