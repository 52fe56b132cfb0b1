"""The documentation as a site that needs no network: pages are gathered for mkdocs-material, which builds, searches and checks every link.

    python -m tools.site            # writes site/; the contents are in mkdocs.yml
    python -m tools.site site 0.2   # writes site/0.2 next to other versions there, which readers can switch between where it is served

README.md becomes the first page, and files of the source that pages link to become pages of code.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
import shutil
import sys
from pathlib import Path

from tools import pages

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
SOURCES = (".py", ".json", ".toml", ".yaml", ".txt", ".csv")  # linked files that become a page of code
LANGUAGE = {"py": "python", "txt": "text"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```(\w+)[^\n]*$", re.M)


SHIM = "https://unpkg.com/iframe-worker/shim"  # the theme's; browsers start no worker from a file
WORKER = """if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = Object.assign(document.createElement("iframe"), {hidden: true});
    document.body.appendChild(frame);
    this.inner = frame.contentWindow;
    this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
    this.inner.importScripts = (...urls) => Promise.all(urls.map(url => this.load(url)));
    this.ready = this.load(url);
  }
  load(url) {
    const script = this.inner.document.createElement("script");
    script.src = new URL(url, location.href).href;
    return new Promise(done => { script.onload = done; this.inner.document.body.appendChild(script); });
  }
  postMessage(data) { this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", {data}))); }
};
"""


class Broken(Exception):
    """What mkdocs complained of: links or anchors that lead nowhere, pages outside the contents."""


def gather(out: Path, root: Path = ROOT) -> None:
    """The pages as mkdocs reads them: in one folder, with links between them."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    names = [*(name for name in OUTSIDE if (root / name).exists()), *(f"docs/{p.name}" for p in sorted((root / "docs").glob("*.md")))]
    for name in names:
        (out / page_of(name)).write_text(FENCE.sub(fence, linked(name, (root / name).read_text(), root, out)))
    for notebook in sorted((root / "docs").glob("*.ipynb")):
        head, _, rest = pages.text_of(notebook).partition("\n")
        note = f"This page is a notebook: [{notebook.name}]({notebook.name}), run by the tests."
        (out / f"{notebook.stem}.md").write_text(f"{head}\n\n{note}\n{linked(f'docs/{notebook.name}', rest, root, out)}")
        shutil.copy(notebook, out)
    for picture in [*(root / "docs").glob("*.png"), *(root / "docs").glob("*.svg")]:
        shutil.copy(picture, out)


def page_of(name: str) -> str:
    return OUTSIDE.get(name, re.sub(r"\.ipynb$", ".md", name.removeprefix("docs/")))


def fence(found: re.Match[str]) -> str:
    """A block's language alone: what tests read of it is not for mkdocs."""
    return f"```{ {'output': 'text'}.get(found[1], found[1])}"


def linked(name: str, text: str, root: Path, out: Path) -> str:
    """The page with its links as they are in the one folder."""

    def address(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        if path.endswith(SOURCES) and (root / path).is_file():
            page = f"source/{path}.md"
            (out / page).parent.mkdir(parents=True, exist_ok=True)
            language = LANGUAGE.get(Path(path).suffix[1:], Path(path).suffix[1:])
            (out / page).write_text(f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{(root / path).read_text()}\n````\n")
            return f"{found[1]}{page}{found[3]}"
        return f"{found[1]}{page_of(path)}{'#' + anchor if anchor else ''}{found[3]}"

    return LINK.sub(address, text)


def build(out: Path, root: Path = ROOT, versions: bool = False) -> list[str]:
    """Writes the site; its pages. With `versions` they have a menu of the versions that lie next to it."""
    from mkdocs.commands.build import build as make
    from mkdocs.config import load_config

    said: list[str] = []
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mkdocs")
    logger.addHandler(heard)
    gathered = out.parent / f".{out.name}-pages"
    try:
        gather(gathered, root)
        config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(gathered.resolve()), site_dir=str(out.resolve()), strict=False)
        if versions:
            config["extra"]["version"] = {"provider": "mike"}  # the theme's name for a versions.json one folder up
        make(config)
    finally:
        logger.removeHandler(heard)
        shutil.rmtree(gathered, ignore_errors=True)
    if said:
        raise Broken("\n".join(said))
    (out / "assets" / "worker.js").write_text(WORKER)
    for page in out.rglob("*.html"):
        up = "../" * (len(page.relative_to(out).parts) - 1)
        page.write_text(page.read_text().replace(SHIM, f"{up}assets/worker.js"))
    return sorted(str(p.relative_to(out)) for p in out.rglob("*.html"))


def release(out: Path, version: str, root: Path = ROOT) -> list[str]:
    """Writes the site of one version into a folder of them all; the newest is where readers arrive."""
    made = build(out / version, root, versions=True)
    known = sorted({p.parent.name for p in out.glob("*/index.html")}, key=lambda v: [int(n) for n in re.findall(r"\d+", v)], reverse=True)
    listed = [{"version": v, "title": v, "aliases": ["latest"] if v == known[0] else []} for v in known]
    (out / "versions.json").write_text(json.dumps(listed) + "\n")
    first = f"{known[0]}/index.html"
    (out / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={first}"><a href="{first}">weft {known[0]}</a>\n')
    return made


def main() -> int:
    out, version = Path((sys.argv[1:] or ["site"])[0]), (sys.argv[2:] or [""])[0]
    try:
        made = release(out, version) if version else build(out)
    except Broken as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(made)} pages in {out}/; open {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
