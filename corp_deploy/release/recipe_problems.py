"""Problems of what a recipe names, collected and reported at once: a line for each, with the recipe's file and key."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ground.errors import BadInput


class RecipeProblems:
    """Those of one recipe."""

    def __init__(self, recipe: Path) -> None:
        self._recipe = recipe.resolve()
        self._lines: list[str] = []

    def add(self, words: str) -> None:
        self._lines.append(f"{self._recipe}: {words}")

    @contextmanager
    def at(self, key: str = "") -> Iterator[None]:
        """A BadInput within it is a mistake of this key; of what it names itself where none is given."""
        try:
            yield
        except BadInput as error:
            self.add(f"{key}: {error}" if key else str(error))

    def refuse(self) -> None:
        """Raise BadInput where there are any."""
        if self._lines:
            raise BadInput("\n".join(self._lines))
