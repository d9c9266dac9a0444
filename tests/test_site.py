"""The documentation site: it builds without a warning, and every page works in a real browser."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parent.parent
OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
SMALLEST_TEXT = 11  # pixels
LEAST_CONTRAST = 4.5  # WCAG 2.2, level AA

# The widest element that sticks out of the page, apart from what scrolls by itself.
OVERFLOW = """() => {
    const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    if (wide <= 0) return "";
    const out = [...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1);
    return `${wide} px too wide: ` + out.slice(0, 3).map(e => e.outerHTML.slice(0, 120)).join(" | ");
}"""

# Text of the article: its size in pixels, and its least contrast with what is behind it.
READABILITY = """() => {
    const channels = colour => {
        if (!colour.startsWith("rgb")) throw new Error(`another kind of colour: ${colour}`);
        const [r, g, b, alpha = 1] = colour.match(/[\\d.]+/g).map(Number);
        return [r, g, b, alpha];
    };
    const over = (colour, behind) => {
        const [r, g, b, alpha] = channels(colour);
        return [r, g, b].map((value, i) => alpha * value + (1 - alpha) * behind[i]);
    };
    const luminance = rgb => {
        const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const known = new Map();
    const behind = element => {
        if (!element) return [255, 255, 255];
        if (!known.has(element))
            known.set(element, over(getComputedStyle(element).backgroundColor, behind(element.parentElement)));
        return known.get(element);
    };
    const contrast = element => {
        const back = behind(element), front = over(getComputedStyle(element).color, back);
        const [low, high] = [luminance(back), luminance(front)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const parts = ["p", "li", "td", "dt", "dd", "h1", "h2", "h3", "a", "code"].map(tag => "article " + tag).join();
    const shown = [...document.querySelectorAll(parts)].filter(e => e.textContent.trim() && e.checkVisibility());
    const text = shown.filter(e => !e.matches(".headerlink, .md-footer *"));
    const worst = text.map(e => [contrast(e), e]).sort((a, b) => a[0] - b[0])[0];
    return {
        count: text.length,
        contrast: worst[0],
        where: worst[1].outerHTML.slice(0, 160),
        size: Math.min(...text.filter(e => e.tagName !== "CODE").map(e => parseFloat(getComputedStyle(e).fontSize))),
    };
}"""


# The dark scheme, at once: colours otherwise fade for a quarter of a second.
DARKEN = """() => {
    const still = document.createElement("style");
    still.textContent = "* {transition: none !important}";
    document.head.append(still);
    document.body.setAttribute("data-md-color-scheme", "slate");
}"""


class Anchors(HTMLParser):
    """The links of a page and the anchors that others can point at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(str(values["id"]))
        for name in ("href", "src"):
            if values.get(name):
                self.links.append(str(values[name]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of MkDocs, such as a link to a page that is not there, fails it."""
    if find_spec("mkdocs") is None or find_spec("material") is None or find_spec("mkdocstrings") is None:
        pytest.fail("the site is built with MkDocs, which is missing: pip install --editable '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> list[str]:
    """The addresses of all pages, from the root of the site."""
    found = [path.relative_to(site).as_posix() for path in sorted(site.rglob("index.html"))]
    return [name.removesuffix("index.html") for name in found]


@pytest.fixture(scope="module")
def server(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/"
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("the site is tested in a real browser, and there is none: apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        yield launched
        launched.close()


@pytest.mark.slow
def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    parsed = {path.relative_to(site).as_posix(): Anchors(path.read_text()) for path in site.rglob("*.html")}
    assert len(parsed) > 30
    broken = []
    for name, page in parsed.items():
        for link in page.links:
            address = urlsplit(urljoin(f"http://site/{name}", link))
            if address.netloc != "site":
                continue
            target = unquote(address.path).removeprefix("/")
            target += "index.html" if not target or target.endswith("/") else ""
            there = (site / target).is_file()
            if not there or (address.fragment and unquote(address.fragment) not in parsed[target].ids | {"__toc"}):
                broken.append(f"{name}: {link}")
    assert not broken, "\n".join(broken)


@pytest.mark.slow
def test_nothing_comes_from_another_server(site: Path) -> None:
    """The site works without a network: fonts, scripts and pictures are its own."""
    loaded = re.compile(r"<(?:link|script|img|iframe)[^>]*(?:href|src)=[\"']?(?:https?:)?//")
    assert not [path for path in site.rglob("*.html") if loaded.search(path.read_text())]


@pytest.mark.slow
def test_pages_are_generated_from_the_code(site: Path) -> None:
    commands = (site / "reference" / "commands" / "index.html").read_text()
    assert all(name in commands for name in ("byzpg federation demo", "--switch-probability", "--metrics-port"))
    assert "generated:" not in commands
    options = (site / "reference" / "configuration" / "index.html").read_text()
    assert all(name in options for name in ("num_attackers", "NNM(TrimmedMean())"))
    rules = (site / "reference" / "api" / "robust" / "index.html").read_text()
    assert 'id="byzpg.robust.aggregators.RFA"' in rules


@pytest.mark.slow
def test_every_page_is_readable(browser: Browser, server: str, pages: list[str]) -> None:
    """On a phone, in light and dark: no errors, nothing wider than the page, large and clear text."""
    problems: list[str] = []
    page = browser.new_page(viewport=PHONE, color_scheme="light")  # pyright: ignore[reportArgumentType]
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("response", lambda reply: problems.append(f"{reply.url}: {reply.status}") if reply.status >= 400 else None)
    for name in pages:
        page.goto(server + name)
        problems += [f"/{name}, light: {each}" for each in troubles(page)]
        page.evaluate(DARKEN)
        problems += [f"/{name}, dark: {each}" for each in troubles(page)]
    page.close()
    assert not problems, "\n".join(problems)


def troubles(page: Page) -> Iterator[str]:
    if overflow := page.evaluate(OVERFLOW):
        yield overflow
    found = page.evaluate(READABILITY)
    if not found["count"]:
        yield "it shows no text."
    if found["size"] < SMALLEST_TEXT:
        yield f"text of {found['size']:.1f} px."
    if found["contrast"] < LEAST_CONTRAST:
        yield f"a contrast of {found['contrast']:.1f}: {found['where']}"


@pytest.mark.slow
def test_light_and_dark_can_be_switched_and_the_search_finds_a_rule(browser: Browser, server: str) -> None:
    page = browser.new_page(viewport=DESKTOP, color_scheme="light")  # pyright: ignore[reportArgumentType]
    page.set_default_timeout(120_000)  # a busy machine takes its time
    page.goto(server)
    assert page.locator("body").get_attribute("data-md-color-scheme") == "default"
    # Once the search is ready, so are the page's other scripts: an earlier click would be lost.
    expect(page.locator(".md-search-result__meta")).to_have_text("Type to start searching", timeout=120_000)
    page.get_by_title("Switch to dark mode").click()
    page.wait_for_selector('body[data-md-color-scheme="slate"]')
    page.get_by_placeholder("Search").press_sequentially("geometric median")  # the search listens to keys
    page.wait_for_selector(".md-search-result__link")
    page.close()


def test_lines_are_short_and_the_front_door_is_small() -> None:
    texts = [*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md"), *(ROOT / "docs").rglob("*.md")]
    lines = {path: path.read_text().splitlines() for path in texts}
    assert not [f"{path}:{n}" for path in texts for n, line in enumerate(lines[path], 1) if len(line) > 120]
    assert len(lines[ROOT / "README.md"]) <= 150
