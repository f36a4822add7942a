"""Links inside the built site: pages, files and anchors that are not there.

    python docs/check_links.py docs/_build/html

Links to other sites are not followed.
"""

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Targets of links and sources of images, and the anchors to link to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        for name in ("href", "src"):
            if found.get(name):
                self.links.append(found[name])


@cache
def page(path):
    return Page(path)


def broken(root):
    """A line for each link of a page that leads nowhere."""
    for path in sorted(root.rglob("*.html")):
        for link in dict.fromkeys(page(path).links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path
            if parts.path:
                start = root if parts.path.startswith("/") else path.parent
                target = (start / unquote(parts.path).lstrip("/")).resolve()
            where = path.relative_to(root)
            if not target.is_file():
                yield f"{where}: no file for {link}"
            elif parts.fragment and target.suffix == ".html":
                anchor = unquote(parts.fragment)
                if anchor not in page(target).anchors and anchor != "":
                    yield f"{where}: no anchor for {link}"


def main():
    root = Path(sys.argv[1]).resolve()
    num_pages = sum(1 for _ in root.rglob("*.html"))
    if not num_pages:
        raise SystemExit(f"error: there are no pages in {root}")
    found = list(broken(root))
    print("\n".join([*found, f"{num_pages} pages, {len(found)} broken links"]))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
