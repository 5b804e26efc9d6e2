"""Let pages of docs/ link files of the repository, which mkdocs knows nothing of.

A picture outside of docs/ is copied into the site. A link to any other file there becomes the file's path,
as the site has no page of it; on a page of a code host the link works. A link to nothing fails the build.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
PICTURES = (".svg", ".png")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every picture that a page shows from outside of docs/."""
    for page in Path(config.docs_dir).glob("*.md"):
        for _, _, path in OUTSIDE.findall(page.read_text(encoding="utf-8")):
            if not (ROOT / path).exists():
                raise PluginError(f"{page.name}: links ../{path}, which is not in the repository")
            if path.endswith(PICTURES) and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point pictures at their copies, and write other files outside of docs/ as their paths."""
    return OUTSIDE.sub(_inside, markdown)


def _inside(link: re.Match[str]) -> str:
    picture, text, path = link.groups()
    if picture:
        return f"![{text}]({PurePosixPath(path)})"
    return f"{text} (`{path}`)" if text.strip("`") != path.rstrip("/") else f"`{path}`"
