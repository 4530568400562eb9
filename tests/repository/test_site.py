"""The documentation as a site: it builds without a broken link, and a real browser shows it and searches in it."""

import html
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts.site_pages import code_in_lists, site_links
from tests.repository.browser import HEADLESS, evaluated, needs_browser, open_browser

ROOT = Path(__file__).resolve().parents[2]
LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr  # strict: a warning is an error
    assert "WARNING" not in built.stderr
    return folder


def shown(page: str, *options: str) -> str:
    """The document as a browser has it after its scripts have run."""
    command = [*HEADLESS, "--virtual-time-budget=8000", *options]
    result = subprocess.run([*command, "--dump-dom", page], capture_output=True, text=True, check=True, timeout=120)
    return result.stdout


def test_every_page_of_the_repository_is_in_the_site(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "contributing"}
    assert pages <= {path.stem for path in site.glob("*.html")}
    start = (site / "index.html").read_text()
    assert all(f'href="{page}.html' in start for page in pages - {"index"})


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in site.glob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*src=\"([^\"]+)\"|<link[^>]*rel=\"stylesheet\"[^>]*href=\"([^\"]+)",
            path.read_text(),
        )
        addresses = [address for pair in loaded for address in pair if address]
        assert addresses
        assert not [address for address in addresses if address.startswith(("http", "//"))], path


def test_links_are_those_of_the_site() -> None:
    text = "[a](docs/data.md#packing) [b](../CONTRIBUTING.md) [loop](trainer/trainer.py) [c](https://x.y) [d](#here)"
    assert site_links(text) == (
        "[a](data.md#packing) [b](contributing.md) `trainer/trainer.py` [c](https://x.y) [d](#here)"
    )
    assert site_links("[gone](nowhere.md)") == "[gone](nowhere.md)"  # the build refuses it


def test_code_in_a_list_is_code(site: Path) -> None:
    item = "* one:\n\n{0}[training]\n{0}seq_len = 2048\n\n{0}# more\n\n  and prose\n\n{0}code\n\nEnd\n\n    top"
    assert code_in_lists(item.format(" " * 6)) == item.format(" " * 8)
    blocks = re.findall(r"<pre>.*?</pre>", (site / "configuration.html").read_text(), re.DOTALL)
    page = re.sub(r"<[^>]+>", "", "".join(blocks))
    inherited = (ROOT / "docs" / "configuration.md").read_text()
    block = re.search(r"\n\n((?:      \S.*\n)+)", inherited)[1]
    for line in block.splitlines():
        assert html.unescape(page).count(line.strip()), line


@needs_browser
def test_code_is_not_cut_on_a_screen_of_1280_pixels(site: Path, tmp_path: Path) -> None:
    """A cut line would hide the explanation at its end."""
    script = (
        "<script>addEventListener('load', () => { const cut = [...document.querySelectorAll('pre > code')]"
        ".filter(x => x.scrollWidth > x.clientWidth + 1).map(x => x.innerText.slice(0, 60));"
        "document.title = 'cut: ' + JSON.stringify(cut) })</script>"
    )
    page = site / "measured.html"
    page.write_text((site / "index.html").read_text().replace("</body>", f"{script}</body>"))
    dom = shown(f"file://{page}", "--window-size=1280,900")
    assert "<title>cut: []</title>" in dom, re.search(r"<title>.*?</title>", dom)


@needs_browser
@pytest.mark.parametrize(("scheme", "name"), [(DARK, "slate"), pytest.param(LIGHT, "default", marks=pytest.mark.slow)])
def test_a_browser_shows_it_light_and_dark(site: Path, tmp_path: Path, scheme: str, name: str) -> None:
    page = f"file://{site}/context_parallelism.html"
    dom = shown(page, scheme)
    assert f'data-md-color-scheme="{name}"' in dom
    assert "Context parallelism" in dom
    picture = tmp_path / "page.png"
    command = [*HEADLESS, scheme, "--window-size=1200,2000"]
    subprocess.run(
        [*command, "--virtual-time-budget=8000", f"--screenshot={picture}", page],
        capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    from matplotlib.image import imread

    pixels = imread(picture)[..., :3]
    assert pixels.shape[0] == 2000
    assert bool(pixels.mean() > 0.7) is (name == "default")
    assert pixels.std() > 0.05  # there is something on it


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The address of a server of the site; a browser searches only on one."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


@needs_browser
def test_the_search_finds_a_word(address: str, tmp_path: Path) -> None:
    """By the protocol: a dump of the document is made before the results are there."""
    results = "document.querySelector('.md-search-result__list')?.innerText"
    with open_browser(tmp_path) as browser:
        assert "Context parallelism" in evaluated(browser, f"{address}/index.html?q=zigzag", results)
