"""A MkDocs hook: add the pages outside docs/ to the site, and rewrite links that leave docs/."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from benchmarks.pages.root_pages import ROOT_PAGES, led_anew, page_of_root


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the root of the repository, where a code host looks for them."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, ROOT_PAGES[name], content=page_of_root(name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links out of docs/ rewritten to the site's pages."""
    at = page.file.src_uri
    return markdown if at in ROOT_PAGES.values() else led_anew(markdown, f"docs/{at}", at)
