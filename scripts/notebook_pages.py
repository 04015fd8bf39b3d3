"""A hook of mkdocs: a notebook with its outputs is a page of the site. Nothing is run, and nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from notebooks import markdown, read


class NotebookFile(File):
    """A notebook that mkdocs takes for a page."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: Any) -> Files:
    """Take the notebooks for pages."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            files.append(NotebookFile(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


def on_page_read_source(page: Any, config: Any) -> str | None:
    """Show a notebook as Markdown; other pages are read as usual."""
    path = Path(page.file.abs_src_path or "")
    return markdown(read(path)) if path.suffix == ".ipynb" else None
