"""The table [parity] of a recipe as a type. Imports no torch."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from corp_deploy.families.trusted_code import refuse_untrusted
from corp_deploy.invocation.option import option, options_of, path_from
from corp_deploy.invocation.proof import MetricOptions, ProofOptions
from corp_deploy.invocation.values import FILE, Repeated
from corp_deploy.proof.metric_request import OUTPUTS, MetricRequest, metrics_from_texts
from ground.errors import BadInput
from ground.quantity import quoted

from .recipe_record import keys_alone, record_of, table_of

FILES = keys_alone(
    metric_files=option(
        Repeated(each=FILE), (), help="Files that the commands of `metric` name; their digests stand in the record."
    )
)


class ParityTable(table_of(options_of(MetricOptions), FILES, options_of(ProofOptions))):  # type: ignore[misc]
    """What is proved; `metric`: commands that measure outputs, of which some read `metric_files`."""

    def __post_init__(self) -> None:
        _ = self.options
        if self.metric_files and not self.metric:
            raise BadInput("parity.metric_files are what the commands of parity.metric read, and there are none")
        names = [path.name for path in self.metric_files]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BadInput(f"parity.metric_files: two are called {twice!r}, by which commands name them; rename one")
        for request in metrics_from_texts(self.metric):
            if request.is_code:
                raise BadInput(
                    f"parity.metric {request.name}: a recipe takes commands, such as 'python score.py {{outputs}}'"
                )

    def metrics(self, directory: Path) -> list[str]:
        """The commands as they are run in the directory, from where `metric_files` are named by their paths."""
        paths, located = {path.name: path_from(directory, path) for path in self.metric_files}, []
        for request in metrics_from_texts(self.metric):
            words = (paths.get(Path(word).name) or word for word in request.argv)
            located.append(f"{request.name}={shlex.join(words).replace(shlex.quote(OUTPUTS), OUTPUTS)}")
        return located

    def untold_files(self, beside: Path, directory: Path) -> list[str]:
        """Words of the commands that name files beside the recipe, of which neither it nor the directory knows."""
        file_names = {path.name for path in self.metric_files}
        words = (word for request in metrics_from_texts(self.metric) for word in request.argv if OUTPUTS not in word)
        return [
            word
            for word in dict.fromkeys(words)
            if Path(word).name not in file_names and (beside / word).is_file() and not (directory / word).is_file()
        ]

    @property
    def options(self) -> ProofOptions:
        """The same as `verify` takes it."""
        return record_of(ProofOptions, self, "parity")


def trusted_metrics(texts: Sequence[str]) -> tuple[MetricRequest, ...]:
    """The measures of a recipe, whose commands nobody typed. Raises BadInput where code isn't trusted."""
    requests = metrics_from_texts(texts)
    for request in requests:
        refuse_untrusted(f"parity.metric: {quoted(request.command)}", to="measure outputs")
    return tuple(requests)
