"""[reduce] of a recipe as a type: what is asked of the reduction, and the same as `reduce` takes it. No torch."""

from corp_deploy.invocation.option import options_of
from corp_deploy.invocation.reduction import ReduceOptions

from .recipe_record import record_of, table_of


class ReduceTable(table_of("ReduceKeys", options_of(ReduceOptions))):  # type: ignore[misc]
    """Shares to remove (`mlp`, `attn`, `conv`, `residual`), to keep of the whole model (`macs`, `params`,
    `latency` by the tables of a directory), or the most that may be lost (`within`), and how.
    """

    def __post_init__(self) -> None:
        _ = self.choice

    @property
    def choice(self) -> ReduceOptions:
        """The same as `reduce` takes it."""
        return record_of(ReduceOptions, self, "reduce")
