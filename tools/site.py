"""The documentation as a site: every page of the list below as HTML that needs no network, links checked.

    python -m tools.site            # writes site/

Markdown is read by markdown-it and code coloured by Pygments, both of which rich brings. A link or an anchor that leads
nowhere ends the build.
"""

from __future__ import annotations

import html
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parent.parent
CONTENTS = {
    "Begin": ["README.md", "docs/first-plan.md", "docs/coming-from.md"],
    "Do": ["docs/schedules.md", "docs/ops.md", "docs/clusters.md", "docs/training.md", "docs/dynamic.md", "docs/rules.md", "docs/report.md"],
    "Understand": ["docs/how-it-works.md", "docs/design.md", "docs/planning.md", "docs/foresight.md", "docs/performance.md"],
    "Look up": ["docs/api.md", "docs/errors.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}
SOURCES = (".py", ".json", ".toml", ".yaml", ".txt", ".csv")  # linked files that become a page of their own


@dataclass
class Page:
    """A file of the repository and the page it becomes."""

    source: str
    title: str = ""
    body: str = ""
    anchors: set[str] = field(default_factory=set)
    links: list[tuple[str, int]] = field(default_factory=list)  # target and line

    @property
    def out(self) -> str:
        if self.source == "README.md":
            return "index.html"
        path = Path(self.source)
        return f"{path.stem}.html" if path.suffix == ".md" else f"source/{self.source}.html"


class Broken(Exception):
    """Links that lead nowhere, each with its page and line."""


def build(out: Path, root: Path = ROOT) -> list[Page]:
    """Writes the site; the pages it has."""
    listed = [name for names in CONTENTS.values() for name in names if (root / name).exists()]
    pages = {name: render(name, (root / name).read_text()) for name in listed}
    for page in list(pages.values()):
        for target, _ in page.links:
            name = resolve(page.source, target)[0]
            if name and name not in pages and name.endswith(SOURCES) and (root / name).is_file():
                pages[name] = Page(name, Path(name).name, coloured((root / name).read_text(), Path(name).suffix[1:]))
    missing = [f"{p.source}, line {line}: {target}" for p in pages.values() for target, line in p.links if not leads(p, target, pages, root)]
    if missing:
        raise Broken("links that lead nowhere:\n  " + "\n  ".join(missing))
    out.mkdir(parents=True, exist_ok=True)
    (out / "style.css").write_text(style())
    for page in pages.values():
        place = out / page.out
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(whole(page, pages))
    copy_pictures(root, out)
    return list(pages.values())


def copy_pictures(root: Path, out: Path) -> None:
    for picture in [*(root / "docs").rglob("*.png"), *(root / "docs").rglob("*.svg")]:
        place = out / picture.relative_to(root / "docs")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(picture.read_bytes())


# -- one page ------------------------------------------------------------------------------------------------------------------


def render(source: str, text: str) -> Page:
    page = Page(source)
    tokens = reader().parse(text)
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        line = (token.map or [0])[0] + 1
        if token.type == "heading_open" and after is not None:
            anchor = slug(after.content)
            page.anchors.add(anchor)
            token.attrSet("id", anchor)
            page.title = page.title or re.sub(r"[`*]", "", after.content)
        for child in token.children or []:
            for attr in ("href", "src"):
                target = child.attrGet(attr)
                if target and "://" not in target:
                    page.links.append((target, line))
                    child.attrSet(attr, address(page, target))
    page.body = reader().renderer.render(tokens, reader().options, {})
    return page


@cache
def reader() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": True, "highlight": lambda text, lang, _: coloured(text, lang)}).enable("table")


def coloured(text: str, lang: str) -> str:
    try:
        lexer = get_lexer_by_name({"output": "text", "sh": "bash", "": "text"}.get(lang, lang))
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    return f'<pre class="{lang or "text"}"><code>{highlight(text, lexer, HtmlFormatter(nowrap=True))}</code></pre>'


def slug(heading: str) -> str:
    """The anchor GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


# -- links ---------------------------------------------------------------------------------------------------------------------


def resolve(source: str, target: str) -> tuple[str, str]:
    """The file of the repository a link names, and the anchor in it."""
    path, _, anchor = target.partition("#")
    if not path:
        return source, anchor
    parts: list[str] = []
    for part in (*Path(source).parent.parts, *path.split("/")):
        parts = parts[:-1] if part == ".." else [*parts, part] if part not in (".", "") else parts
    return "/".join(parts), anchor


def address(page: Page, target: str) -> str:
    """The link as the site has it; pages lie flat, sources and pictures keep their folders."""
    name, anchor = resolve(page.source, target)
    if name.endswith((".png", ".svg")):
        return name.removeprefix("docs/")
    if not name.endswith((".md", *SOURCES)):
        return target
    return Page(name).out + (f"#{anchor}" if anchor else "")


def leads(page: Page, target: str, pages: dict[str, Page], root: Path) -> bool:
    name, anchor = resolve(page.source, target)
    if name not in pages:
        return not name.endswith(".md") and (root / name).exists()
    return not anchor or anchor in pages[name].anchors


# -- the frame -----------------------------------------------------------------------------------------------------------------


def whole(page: Page, pages: dict[str, Page]) -> str:
    up = "../" * page.out.count("/")
    body = page.body if not up else page.body.replace('href="', f'href="{up}')
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(page.title)} - weft</title>
<link rel="stylesheet" href="{up}style.css">
<a class="skip" href="#page">Skip to the page</a>
<nav aria-label="Contents"><details open><summary>weft</summary>
{contents(page, pages, up)}
</details></nav>
<main id="page">
{body}
</main>
</html>
"""


def contents(page: Page, pages: dict[str, Page], up: str) -> str:
    out = []
    for title, names in CONTENTS.items():
        out.append(f"<h2>{title}</h2><ul>")
        for other in (pages[n] for n in names if n in pages):
            here = ' aria-current="page"' if other is page else ""
            out.append(f'<li><a href="{up}{other.out}"{here}>{html.escape(other.title)}</a></li>')
        out.append("</ul>")
    return "\n".join(out)


def style() -> str:
    light = HtmlFormatter(style="friendly").get_style_defs("pre")
    dark = HtmlFormatter(style="nord").get_style_defs("pre")
    return CSS + plain(light) + "@media (prefers-color-scheme: dark) {" + plain(dark) + "}\n"


def plain(rules: str) -> str:
    """Only what colours words; the frame has its own background."""
    return "\n".join(r for r in rules.splitlines() if r.startswith("pre .")) + "\n"


CSS = """:root { color-scheme: light dark; --ink: #1c2024; --paper: #fdfdfc; --quiet: #5f6772; --line: #dfe2e6; --code: #f4f5f3; --link: #0a58a8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dee2e6; --paper: #16181b; --quiet: #99a2ad; --line: #32373d; --code: #1f2226; --link: #7db8f0 }
}
* { box-sizing: border-box }
body { margin: 0; display: grid; grid-template-columns: 17rem minmax(0, 1fr); font: 16px/1.6 system-ui, sans-serif; color: var(--ink);
  background: var(--paper) }
a { color: var(--link) }
.skip { position: absolute; left: -100rem }
.skip:focus { left: 1rem; top: 1rem; background: var(--paper); padding: .3rem .6rem }
nav { border-right: 1px solid var(--line); padding: 1.2rem; position: sticky; top: 0; height: 100vh; overflow: auto; font-size: .93rem }
nav summary { font-weight: 700; font-size: 1.2rem; cursor: pointer }
nav h2 { font-size: .78rem; margin: 1.1rem 0 .2rem; color: var(--quiet); text-transform: uppercase; letter-spacing: .06em }
nav ul { list-style: none; margin: 0; padding: 0 }
nav a { display: block; padding: .12rem .4rem; text-decoration: none; border-radius: 4px }
nav a[aria-current] { background: var(--code); font-weight: 600; color: var(--ink) }
main { padding: 1.5rem clamp(1rem, 4vw, 3.5rem) 5rem; max-width: 64rem }
h1 { line-height: 1.2 } h2 { margin-top: 2.4rem } h1, h2, h3 { scroll-margin-top: 1rem }
pre { background: var(--code); padding: .8rem 1rem; border-radius: 6px; overflow-x: auto; font-size: .84rem; line-height: 1.45 }
pre.output { border-left: 3px solid var(--line); border-radius: 0 6px 6px 0; color: var(--quiet) }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace } :not(pre) > code { background: var(--code); padding: .1em .3em; border-radius: 4px;
  font-size: .88em }
table { border-collapse: collapse; display: block; overflow-x: auto } td, th { border: 1px solid var(--line); padding: .3rem .6rem; text-align: left }
img { max-width: 100% }
@media (max-width: 52rem) { body { display: block } nav { position: static; height: auto; border: 0; border-bottom: 1px solid var(--line) } }
@media print { nav { display: none } body { display: block } }
"""


def main(argv: Any = None) -> int:
    out = Path((argv or sys.argv[1:] or ["site"])[0])
    try:
        made = build(out)
    except Broken as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(made)} pages in {out}/; open {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
