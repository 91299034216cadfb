"""What MkDocs is told of pages that are made while they are built: those at the root of the repository, and what
benchmarks/pages/made.py makes of the code.
"""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from benchmarks.pages.made import for_site
from benchmarks.pages.root_pages import ROOT_PAGES, led_anew, page_of_root


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that stand at the root of the repository, where a code host looks for them."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, ROOT_PAGES[name], content=page_of_root(name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with what is made of the code, and with links that lead out of docs/ led to where those pages stand."""
    own, at = page.file.src_uri in ROOT_PAGES.values(), page.file.src_uri
    try:
        return for_site(markdown if own else led_anew(markdown, f"docs/{at}", at))
    except ValueError as error:
        raise PluginError(f"{at}: {error}") from error
