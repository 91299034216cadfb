"""Images of a proof as a step takes them: normalised, or as the pixels that they were made of."""

from collections.abc import Sequence
from dataclasses import dataclass

from corp_deploy.families import traced_model
from corp_deploy.families.family import image_spec
from corp_deploy.families.timm_images import ImageSpec
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.graph_input import GraphInput, graph_ports
from ground.errors import BadInput
from ground.feeds import Feeds, single_array
from ground.pixels import PIXEL, Normalisation
from ground.ports import Port


def take_pixels(ports: Sequence[Port]) -> bool:
    """Whether these are the ports of a graph or an engine that takes pixels."""
    return len(ports) == 1 and ports[0].dtype == PIXEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """What images are made of: pixels as the images of `spec` are normalised; None of no model of images."""

    spec: ImageSpec | None = None

    def fed(self, feeds: Feeds, ports: Sequence[Port], *, where: str) -> Feeds:
        """The feeds for these ports: pixels where they take those, else as they are."""
        if not take_pixels(ports) or single_array(feeds).dtype == PIXEL:
            return feeds
        return {ports[0].name: self.normalisation(where).pixels(single_array(feeds))}

    def require(self, feeds: Feeds, ports: Sequence[Port], *, where: str) -> None:
        """Raises BadInput where ports take pixels and the images were not made of any."""
        if take_pixels(ports) and single_array(feeds).dtype != PIXEL:
            self.normalisation(where).require_pixels(single_array(feeds), where=where)

    def normalisation(self, where: str) -> Normalisation:
        """Raises BadInput for a model of no images, and for one that is not known to normalise them."""
        if self.spec is None:
            raise BadInput(f"{where}: takes uint8 images, the dense model takes none; export it from that model")
        self.spec.require_normalisation(where=where, instead="take a graph that takes float32")
        return self.spec.normalisation


NO_PIXELS = Pixels()


def pixels_of(checkpoint: Checkpoint) -> Pixels:
    """Those that the images of a model are made of."""
    model = checkpoint.model
    of_images = traced_model.input_spec(model).medium == "images"
    return Pixels(spec=image_spec(model) if of_images else None)


def fed_to_graph(checkpoint: Checkpoint, feeds: Feeds, graph_input: GraphInput) -> Feeds:
    """Feeds of the model as a graph of it takes them. Raises BadInput for images that were not made of pixels."""
    pixels, ports, where = pixels_of(checkpoint), graph_ports(checkpoint, graph_input), f"input {graph_input}"
    pixels.require(feeds, ports, where=where)
    return pixels.fed(feeds, ports, where=where)
