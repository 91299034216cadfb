"""What MkDocs is told of pages that are made while they are built: those at the root of the repository, and tables of
the code.

A page of docs/ has `<!-- made: NAME -->` where a table of TABLES goes, `<!-- made: command NAME -->` where a command's
options do, `<!-- made: function NAME -->` a function's parameters.
"""

import re
from collections.abc import Callable

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from benchmarks.pages.commands import command, commands
from benchmarks.pages.exit_codes import exit_codes
from benchmarks.pages.functions import function
from benchmarks.pages.installed import installed
from benchmarks.pages.recipe import recipe
from benchmarks.pages.root_pages import ROOT_PAGES, led_anew, page_of_root
from benchmarks.pages.worked import worked

TABLES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "exit codes": exit_codes,
    "installed": installed,
    "recipe": recipe,
    "worked example": worked,
}
_MADE = re.compile(r"^<!-- made: (command |function )?([a-z -]+) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that stand at the root of the repository, where a code host looks for them."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, ROOT_PAGES[name], content=page_of_root(name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its tables, and with links that lead out of docs/ led to where those pages stand."""

    def made(match: re.Match[str]) -> str:
        if match[1]:
            return (command if match[1] == "command " else function)(match[2])
        if match[2] not in TABLES:
            raise PluginError(f"{page.file.src_uri}: no table is called {match[2]!r}; there are {', '.join(TABLES)}")
        return TABLES[match[2]]()

    own, at = page.file.src_uri in ROOT_PAGES.values(), page.file.src_uri
    return _MADE.sub(made, markdown if own else led_anew(markdown, f"docs/{at}", at))
