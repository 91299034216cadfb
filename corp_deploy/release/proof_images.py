"""What several stages open of what a recipe names: the images that prove the result. Imports torch."""

from torch import nn

from calib.images import Images
from corp_deploy.invocation.inputs import InputOptions
from corp_deploy.store.inputs import images_for_model


def open_proof_images(model: nn.Module, options: InputOptions) -> Images:
    """Raises BadInput as images_for_model does, and where so many can't be held out."""
    assert options.images is not None, options
    return options.proving(images_for_model(model, options.images, **options.drawn), options.seed)
