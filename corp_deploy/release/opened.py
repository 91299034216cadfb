"""What several stages open of what a recipe names: the trained model, and the images that prove the result. Imports
torch.
"""

from torch import nn

from calib.images import Images
from calib.parts import held_out_of
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.dense_model import load_dense
from corp_deploy.store.inputs import images_for_model

from .recipe import ProofImages
from .recipe_tables import ModelTable


def open_dense(table: ModelTable) -> Checkpoint:
    """Raises BadInput as load_dense does."""
    return load_dense(
        table.model,
        weights=table.weights,
        kwargs=table.kwargs,
        ema=table.ema,
        preprocessing=table.preprocessing,
        outputs=table.named_outputs,
    )


def open_proof_images(model: nn.Module, wanted: ProofImages) -> Images:
    """Raises BadInput as images_for_model does, and where so many can't be held out."""
    images = images_for_model(model, wanted.path, samples=wanted.samples, seed=wanted.seed)
    if wanted.hold_out is None:
        return images
    return held_out_of(images, hold_out=wanted.hold_out, groups=wanted.groups, seed=wanted.seed)
