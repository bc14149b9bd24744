"""Everything on the site that is not a guide: files that guides link to, notebooks, the API, the group widget.

Guides link to files of the repository by relative paths, which work on a forge. On the site such a file is a page
(text, notebooks) or a copy (pictures, data), and links are rewritten to it. mkdocs calls the functions named `on_*`.
"""

import base64
import json
import posixpath
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import reference_page

ROOT = Path(__file__).parents[2]
GUIDES = "recipes/guides"
WIDGET = ROOT / "trl_drgrpo" / "report" / "assets"
PLACE = '<div id="group-widget"></div>'
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
IN_TWO_COLORS = re.compile(r"!\[([^\]]*)\]\((images/\w+)_light\.png\)")
CODE = {".cff": "yaml", ".css": "css", ".py": "python", ".toml": "toml", ".txt": "text", ".yaml": "yaml"}
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.DOTALL)
INLINE_CODE = re.compile(r"<code>([^<\n]*)</code>")
FORMULAS: list[str] = []  # as MathML; in Markdown a formula is its place here, between two characters for private use
STUDIES = {f"recipes/studies/{path.name}": f"studies/{path.name}" for path in (ROOT / "recipes/studies").glob("*.md")}
# Pages with a place of their own in the navigation.
HOMES = {"CHANGELOG.md": "changelog.md", "tests/benchmarks/README.md": "benchmarks.md", **STUDIES}


def on_config(config: Any) -> Any:
    """A link to the repository, whose address is in `pyproject.toml` alone."""
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    config["extra"]["social"] = [{"icon": "material/source-repository", "link": address, "name": "Repository"}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages and the linked files."""
    linked = {path for file in files.documentation_pages() for path in outside(source_of(file), file.content_string)}
    for path in HOMES:
        linked |= {path, *outside(path, (ROOT / path).read_text(encoding="utf-8"))}
    reference = reference_page.page()
    pages: dict[str, str | bytes] = {"reference.md": reference, **api_pages(reference)}
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        made = notebook_page(notebook)
        source = notebook.relative_to(ROOT).as_posix()
        linked |= set(outside(source, made[site_path(source)]))
        pages |= made
    for path in sorted(linked):
        if not path.endswith(".ipynb"):
            pages[site_path(path)] = linked_page(ROOT / path)
    pages["assets/site.css"] = (ROOT / "recipes/site/site.css").read_text(encoding="utf-8")
    if (WIDGET / "group_widget.js").exists():
        for name in ("group_widget.css", "group_widget.js"):
            pages[f"assets/{name}"] = (WIDGET / name).read_text(encoding="utf-8")
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links to files of the repository into links on the site."""
    source = source_of(page.file)
    here = posixpath.dirname(page.file.src_uri)

    def on_site(link: re.Match) -> str:
        path = target(source, link[2])
        return link[0] if path is None else f"{link[1]}{posixpath.relpath(site_path(path), here)}{link[3]}"

    return LINK.sub(on_site, IN_TWO_COLORS.sub(_for_both, markdown))


def _for_both(picture: re.Match) -> str:
    """A picture that also exists for the dark mode, in both."""
    if not (ROOT / GUIDES / f"{picture[2]}_dark.png").exists():
        return picture[0]
    return "".join(f"![{picture[1]}]({picture[2]}_{mode}.png#only-{mode})" for mode in ("light", "dark"))


def on_page_content(html: str, **_: Any) -> str:
    """Puts the formulas in, and the group widget where a page has a place for it; keeps flags whole."""
    html = INLINE_CODE.sub(_in_words, html)
    html = re.sub("\ue000(\\d+)\ue001", lambda place: FORMULAS[int(place[1])], html)
    if not (WIDGET / "group_widget.js").exists():
        return html.replace(PLACE, "")
    loaded = '<link rel="stylesheet" href="assets/group_widget.css"><script src="assets/group_widget.js"></script>'
    mounted = "<script>mountGroupWidget(document.getElementById('group-widget'))</script>"
    return html.replace(PLACE, f"{loaded}{PLACE}{mounted}")


def _in_words(code: re.Match) -> str:
    """Inline code that breaks between words alone: browsers would break `--flag` behind the dashes."""
    words = re.sub(r"[^ ]+", lambda word: f'<span class="word">{word[0]}</span>', code[1])
    return f"<code>{words}</code>"


# Paths of the repository and of the site -----------------------------------------------------------------------------


def source_of(file: File) -> str:
    """Where in the repository the page comes from."""
    name = file.src_uri
    if name.startswith("notebooks/"):
        return name.removesuffix(".md") + ".ipynb"
    return next((path for path, page in HOMES.items() if page == name), f"{GUIDES}/{name}")


def site_path(path: str) -> str:
    """The source of the site on which a file of the repository is: for text a page."""
    if path in HOMES:
        return HOMES[path]
    if path.startswith(f"{GUIDES}/"):
        return path.removeprefix(f"{GUIDES}/")
    if path.endswith(".ipynb"):
        return path.removesuffix(".ipynb") + ".md"
    return f"files/{path}.md" if Path(path).suffix in CODE or path == "LICENSE" else f"files/{path}"


def target(source: str, link: str) -> str | None:
    """The file of the repository that a link from `source` leads to; `None` for any other link."""
    if ":" in link or link.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if (ROOT / path).is_file() else None


def outside(source: str, markdown: str) -> list[str]:
    """Files of the repository, guides and notebooks left out, that a page links to."""
    found = (target(source, link[2]) for link in LINK.finditer(markdown))
    return [path for path in found if path and not path.startswith(f"{GUIDES}/") and not path.endswith(".ipynb")]


# Pages ---------------------------------------------------------------------------------------------------------------


def linked_page(path: Path) -> str | bytes:
    """A page that shows a text file, or the bytes of any other."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if path.suffix not in CODE and path.name != "LICENSE":
        return path.read_bytes()
    return f"# {path.name}\n\n`{name}`\n\n{fence(path.read_text(encoding='utf-8'), CODE.get(path.suffix, 'text'))}"


def api_pages(reference: str) -> dict[str, str]:
    """A page per package with the names that the reference lists, from their docstrings."""
    pages = {}
    for section in reference.split("\n## ")[1:]:
        package, names = re.match(r"`([\w.]+)`", section), re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
        if package is not None and names:
            blocks = "\n\n".join(f"::: {package[1]}.{name}" for name in names)
            pages[f"api/{package[1]}.md"] = f"# {package[1]}\n\n{blocks}\n"
    return pages


def notebook_page(path: Path) -> dict[str, str | bytes]:
    """A notebook with its outputs as a page, and its pictures."""
    parts, pictures = [], {}
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(FORMULA.sub(_as_mathml, source))
            continue
        parts.append(fence(source, "python"))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/markdown" in data:
                parts.append("".join(data["text/markdown"]))
            elif "image/png" in data:
                name = f"{path.stem}_{number}_{len(pictures)}.png"
                pictures[f"notebooks/{name}"] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![output of the cell above]({name})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).strip():
                parts.append(fence(text, "text"))
    return {f"notebooks/{path.stem}.md": "\n\n".join(parts) + "\n", **pictures}


def _as_mathml(formula: re.Match) -> str:
    """Keeps a formula for `on_page_content`; browsers draw MathML without a library."""
    FORMULAS.append(convert(formula[1] or formula[2], display="block" if formula[1] else "inline"))
    return f"\ue000{len(FORMULAS) - 1}\ue001"


def fence(text: str, language: str) -> str:
    """A code block, whatever backticks the text holds."""
    longest = max(map(len, re.findall(r"`{3,}", text)), default=2)
    marks = "`" * (longest + 1)
    return f"{marks}{language}\n{text.rstrip()}\n{marks}"
