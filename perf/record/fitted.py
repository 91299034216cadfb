"""How many of the inputs that judge a model it was fitted to, where it is nearer to the dense one than elsewhere."""

from dataclasses import dataclass

from ground.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedInputs:
    """Of `judging` inputs, those that a model was fitted to: `same` by their content, and `alike` more that only look
    like one of them. Of several models, those that any was fitted to.
    """

    judging: int
    same: int
    alike: int = 0
    noun: str = "images"

    def __post_init__(self) -> None:
        if min(self.same, self.alike) < 0 or self.same + self.alike > self.judging:
            raise BadInput(f"fitted: {self.same} and {self.alike} of {self.judging} {self.noun}")

    @property
    def has_overlap(self) -> bool:
        return self.same + self.alike > 0

    @property
    def clause(self) -> str:
        """Behind `on 64 images`; nothing where none is one of them. A likeness is a hint, and not in it."""
        return f", {self.same} of which the model was fitted to" if self.same else ""

    @property
    def sentence(self) -> str:
        """All of it."""
        alike = f", {self.alike} of which look like {self.noun} that it was fitted to" if self.alike else ""
        return f"the model is judged on {self.judging} {self.noun}{self.clause}{alike}"

    @property
    def warning(self) -> str:
        """And what to do."""
        return f"{self.sentence}; judge it on {self.noun} that calibration never saw"
