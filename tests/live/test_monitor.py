"""The monitor: hostile statuses, the server of the page, and the page in a real browser with real members."""

import asyncio
import gc
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import numpy as np
import pytest
from forking import Forked
from hypothesis import given, settings
from hypothesis import strategies as st
from live_federation import PATIENCE, free_ports, until
from playwright.sync_api import Browser, Page, expect, sync_playwright
from rich.console import Console

from byzpg.cli.federation import Waiting, make_manifest
from byzpg.cli.watch import members_table
from byzpg.config import Config
from byzpg.live.identity import generate, read_key, write_identity
from byzpg.live.links import open_channel
from byzpg.live.manifest import Manifest
from byzpg.live.monitor import PAGE, Ask, Board, Monitor, serve
from byzpg.live.observe import LARGEST_NUMBER, LONGEST_TEXT, MOST_REASONS, Answer, Statuses, parse_status
from byzpg.live.serving import MOST_CONNECTIONS
from byzpg.live.status import CURVE_POINTS, RECENT_STEPS, Numbers, State, Status

NAMES = ("alice", "bob", "carol", "dave", "erin")
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
TINY = Config(
    aggregator="RFA", horizon=50, large_batch=4, small_batch=4, hidden=(8,), rounds=1, trajectories=100_000, num_seeds=4
)


def made_manifest(folder: Path, ports: list[int], options: Config = TINY) -> Manifest:
    """A federation on this machine, with its members' keys beside its manifest."""
    made = [generate(name, f"127.0.0.1:{port}") for name, port in zip(NAMES, ports, strict=True)]
    for identity in made:
        write_identity(folder, *identity)
    waiting = Waiting(grace=0.3, linger=1.0)
    manifest = make_manifest([member for member, _ in made], options, waiting=waiting, rehearsal=True)
    manifest.write(folder / "federation.toml")
    return manifest


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return made_manifest(tmp_path_factory.mktemp("keys"), list(range(9001, 9006)))


def honest(own: int, iterations: int = 60) -> dict[str, Any]:
    """A status in the middle of training, when erin equivocates and dave has left."""
    status = Status(
        names=NAMES,
        own=own,
        num_iterations=300,
        attack="Equivocate()" if own == 4 else None,
        reward_threshold=475.0,
        task="CartPole-v1",
    )
    rng = np.random.default_rng(own)
    status.state = "running"
    status.connected = {0, 1, 2, 4}
    for iteration in range(iterations):
        status.step_ended([True, True, True, iteration < 40, True], 0.01 + 0.002 * rng.random())
        status.combined(True, 0.5, np.array([0.3, 0.34, 0.35, 0, 0.01]))
        status.combined(False, 0.1, None)
        status.iteration_ended(iteration + 1, 4 * iteration + 4, 20 + 4 * iteration + 10 * rng.random())
        if own != 4:
            status.equivocated(4)
    status.reject(4, "signature")
    status.reject(0, "late")
    status.reject(None, "stranger")
    status.bytes = 3_400_000, 3_100_000
    return status.as_data()


def parsed(own: int, **changes: Any) -> Answer:
    answer = parse_status(json.dumps(honest(own) | changes).encode(), NAMES[own], NAMES)
    assert answer is not None
    return answer


# Hostile statuses


def check_shape(answer: Answer) -> None:
    """Every field is present, of its type, finite, and bounded in size."""
    count = range(LARGEST_NUMBER + 1)

    def is_count(value: object) -> bool:
        return type(value) is int and value in count

    def is_number(value: object, low: float = -LARGEST_NUMBER) -> bool:
        return type(value) is float and low <= value <= LARGEST_NUMBER

    def are_reasons(value: object) -> bool:
        assert isinstance(value, dict)
        return len(value) <= MOST_REASONS and all(len(why) <= 24 and is_count(n) for why, n in value.items())

    assert answer.keys() == Answer.__annotations__.keys()
    assert answer["name"] == "bob"
    assert answer["state"] in (*get_args(State), "unknown")
    for text in (answer["task"], answer["rehearsal"] or ""):
        assert len(text) <= LONGEST_TEXT
        assert text.isprintable()
    for field in ("iteration", "num_iterations", "step", "bytes_sent", "bytes_received"):
        assert is_count(answer[field])
    assert set(answer["waiting_for"]) <= set(NAMES)
    assert len(answer["waiting_for"]) <= len(NAMES)
    assert is_number(answer["uptime"], 0)
    assert answer["reward_threshold"] is None or is_number(answer["reward_threshold"])
    assert answer["diameters"].keys() <= {"gradients", "parameters"}
    assert all(is_number(value, 0) for value in answer["diameters"].values())
    assert len(answer["curve"]) <= 2 * CURVE_POINTS
    assert all(is_count(at) and is_number(value) for at, value in answer["curve"])
    assert all(one[0] < other[0] for one, other in zip(answer["curve"], answer["curve"][1:], strict=False))
    assert len(answer["step_seconds"]) <= RECENT_STEPS
    assert all(is_number(value, 0) for value in answer["step_seconds"])
    assert (answer["median_step_seconds"] is None) == (not answer["step_seconds"])
    assert are_reasons(answer["strangers"])
    assert tuple(answer["others"]) == NAMES
    for seen in answer["others"].values():
        assert type(seen["connected"]) is bool
        assert seen["present"] in (None, True, False)
        assert is_count(seen["absences"])
        assert is_count(seen["equivocations"])
        assert seen["weight"] is None or (is_number(seen["weight"]) and 0 <= seen["weight"] <= 1)
        assert are_reasons(seen["rejected"])


def shown_in_terminal(manifest: Manifest, statuses: Statuses) -> str:
    output = StringIO()
    Console(file=output, width=200).print(members_table(manifest, statuses))
    return output.getvalue()


def test_honest_statuses_are_kept() -> None:
    said = honest(1)
    answer = parsed(1)
    check_shape(answer)
    again = json.loads(json.dumps(answer))
    median = again.pop("median_step_seconds")
    assert median == pytest.approx(said.pop("median_step_seconds"), rel=0.1)
    assert again == said
    assert answer["others"]["erin"]["equivocations"] == 60
    assert answer["others"]["dave"]["absences"] == 20


def test_the_name_comes_from_the_certificate() -> None:
    assert parsed(1, name="alice")["name"] == "bob"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([10**400, -1, 1e300, EVIL, "\x1b[2J", "\u202egnp", "running", "erin", "x" * 500]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (*Answer.__annotations__, "__proto__")
SEEN = st.dictionaries(
    st.sampled_from(["connected", "present", "absences", "weight", "equivocations", "rejected"]), JSON, max_size=6
)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8),
    others=st.none() | st.dictionaries(st.sampled_from(NAMES), SEEN | JSON),
    based=st.booleans(),
)
def test_any_status_gets_the_known_shape(manifest: Manifest, changes: Any, others: Any, based: bool) -> None:
    said = (HONEST if based else {}) | changes | ({} if others is None else {"others": others})
    answer = parse_status(json.dumps(said).encode(), "bob", NAMES)
    assert answer is not None
    check_shape(answer)
    again = json.dumps(answer, allow_nan=False)
    assert parse_status(again.encode(), "bob", NAMES) == answer
    statuses: Statuses = {name: answer if name == "bob" else None for name in NAMES}
    text = shown_in_terminal(manifest, statuses)
    assert "\x1b" not in text
    assert "\u202e" not in text


HONEST = honest(1)


@settings(deadline=None)
@given(raw=st.binary(max_size=200))
def test_random_bytes_are_no_answer(raw: bytes) -> None:
    answer = parse_status(raw, "bob", NAMES)
    if answer is not None:
        check_shape(answer)


@pytest.mark.parametrize("raw", [b"", b"[]", b"7", b"\xff", b"[" * 100_000, b"9" * 10_000, b'"running"', b"null"])
def test_json_that_is_no_object_is_no_answer(raw: bytes) -> None:
    assert parse_status(raw, "bob", NAMES) is None


@pytest.mark.parametrize(
    ("field", "said", "kept"),
    [
        ("state", "fine, trust me", "unknown"),
        ("state", ["running"], "unknown"),
        ("rehearsal", "a\x1b[31mb\x00\u202ec", "a[31mbc"),
        ("rehearsal", "x" * 10_000, "x" * LONGEST_TEXT),
        ("rehearsal", 7, None),
        ("iteration", True, 0),
        ("iteration", -3, 0),
        ("iteration", 10**400, 0),
        ("iteration", 2.5, 0),
        ("uptime", -1, 0.0),
        ("uptime", float("nan"), 0.0),
        ("waiting_for", ["erin", "mallory", {}, "alice", "erin"], ["alice", "erin"]),
        ("waiting_for", "erin", []),
        ("curve", [[4, 1.0], [4, 2.0], [3, 1.0], [8, float("inf")], [9], "12", [True, 1], [12, 5]], [(4, 1), (12, 5)]),
        ("curve", {"0": [1, 2]}, []),
        ("step_seconds", [0.1, -1, "2", None, float("nan"), 0.3], [0.1, 0.3]),
        ("strangers", {EVIL: 3, "signature": 2, "late": -1, "size": "x"}, {"signature": 2}),
        ("diameters", {"gradients": 1, "parameters": float("inf"), "x": 2}, {"gradients": 1.0}),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_left_out(field: Any, said: object, kept: object) -> None:
    assert parsed(1, **{field: said})[field] == kept


def test_lists_are_cut_and_members_that_are_not_in_the_manifest_do_not_appear() -> None:
    curve = [[at, 1.0] for at in range(5000)]
    many = {f"{'a' * (1 + index // 26)}{chr(97 + index % 26)}": 1 for index in range(300)}
    others = {"mallory": {"connected": True}, "alice": {"rejected": many, "weight": 1e9}}
    answer = parsed(1, curve=curve, step_seconds=[0.1] * 5000, others=others)
    check_shape(answer)
    assert answer["curve"][-1][0] == 4999
    assert len(answer["curve"]) == 2 * CURVE_POINTS
    assert len(answer["others"]["alice"]["rejected"]) == MOST_REASONS
    assert answer["others"]["alice"]["weight"] == 1.0


def test_the_terminal_shows_texts_as_they_are(manifest: Manifest) -> None:
    statuses: Statuses = {name: parsed(index) for index, name in enumerate(NAMES)}
    statuses["bob"] = parsed(1, rehearsal="[red]/[/]", state="stalled", waiting_for=["erin"])
    statuses["dave"] = None
    text = shown_in_terminal(manifest, statuses)
    assert "rehearsal: [red]/[/]" in text
    assert "stalled for erin" in text
    assert "no answer" in text


# The server


@contextmanager
def monitored(manifest: Manifest, statuses: Statuses) -> Iterator[Monitor]:
    """A monitor of members with these statuses, which may change meanwhile."""

    async def ask() -> Statuses:
        return dict(statuses)

    @asynccontextmanager
    async def source() -> AsyncIterator[Ask]:
        yield ask

    with Monitor(manifest, 0, source, host="127.0.0.1", port=0) as monitor:
        until(lambda: monitor.board.as_data()["age"] is not None, "there is a first poll")
        yield monitor


@pytest.fixture(scope="module")
def server(manifest: Manifest) -> Iterator[Monitor]:
    statuses: Statuses = {name: parsed(index) for index, name in enumerate(NAMES)}
    with monitored(manifest, statuses) as monitor:
        statuses["dave"] = None
        until(lambda: monitor.board.as_data()["statuses"]["dave"] is None, "dave is gone")
        yield monitor


def request(url: str, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=60)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def test_the_page_and_the_last_poll_are_served(server: Monitor, manifest: Manifest) -> None:
    status, headers, content = request(server.url, "GET", "/")
    assert (status, content) == (200, PAGE.read_bytes())
    assert headers["content-type"] == "text/html; charset=utf-8"
    status, headers, content = request(server.url, "GET", "/status.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    data = json.loads(content)
    assert (data["federation"], data["run"], data["num_byzantine"]) == (manifest.federation, manifest.run, 1)
    assert data["members"][1] == {"name": "bob", "address": "127.0.0.1:9002"}
    assert (data["task"], data["reward_threshold"], data["asked_as"]) == ("CartPole-v1", 475, "alice")
    assert data["age"] >= 0
    assert data["statuses"]["dave"] is None
    assert data["statuses"]["bob"] == json.loads(json.dumps(parsed(1)))
    assert data["last_answers"].keys() == {"dave"}
    assert data["last_answers"]["dave"]["status"]["iteration"] == 60


def test_the_return_that_counts_as_solved_is_what_most_members_report(manifest: Manifest) -> None:
    """For a task that is not built in: to look it up would be to run its code."""
    made = replace(manifest, training=manifest.training | {"env": "mallorys.module:task"})
    board = Board(made, 0)
    assert board.as_data()["reward_threshold"] is None
    reported = (200.0, 200.0, None, 200.0, 1e15)
    board.put({name: parsed(own, reward_threshold=reported[own]) for own, name in enumerate(NAMES)})
    assert board.as_data()["reward_threshold"] == 200
    board.put({name: parsed(own, reward_threshold=None if own else 1.0) for own, name in enumerate(NAMES)})
    assert board.as_data()["reward_threshold"] is None


def test_nothing_secret_is_served(server: Monitor) -> None:
    content = request(server.url, "GET", "/status.json")[2].decode()
    assert "PRIVATE KEY" not in content
    assert "CERTIFICATE" not in content


@pytest.mark.parametrize(
    "path", ["/index.html", "/status", "/status.json/", "/?", "/../pyproject.toml", "/%2e%2e/x", "*"]
)
def test_other_paths_do_not_exist(server: Monitor, path: str) -> None:
    assert request(server.url, "GET", path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_only_reading_is_allowed(server: Monitor, method: str) -> None:
    for path in ("/", "/status.json"):
        status, headers, _ = request(server.url, method, path)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert request(server.url, "BREW", "/")[0] == 501


def test_a_head_has_no_body(server: Monitor) -> None:
    for path in ("/", "/status.json"):
        status, headers, content = request(server.url, "HEAD", path)
        assert (status, content) == (200, b"")
        assert int(headers["content-length"]) > 1000
    assert request(server.url, "HEAD", "/nothing")[0] == 404


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("GET", "/status.json"), ("GET", "/no"), ("POST", "/"), ("BREW", "/")]
)
def test_every_answer_has_security_headers(server: Monitor, method: str, path: str) -> None:
    headers = request(server.url, method, path)[1]
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/]+=*'", policy[kind])
    assert not re.search(r"https?:|\*|unsafe", headers["content-security-policy"])
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers
    assert "Python" not in headers["server"]


def test_other_names_for_this_machine_get_nothing(server: Monitor) -> None:
    """DNS rebinding: a website could point its own name to this machine."""
    assert request(server.url, "GET", "/status.json", Host="evil.example")[0] == 421
    assert request(server.url, "GET", "/status.json", Host="127.0.0.1.evil.example:80")[0] == 421
    assert request(server.url, "GET", "/status.json", Host="localhost:8711")[0] == 200
    assert request(server.url, "GET", "/status.json", Host="[::1]:8711")[0] == 200


def test_idle_connections_take_no_more_threads_than_there_are_places() -> None:
    def busy() -> int:
        return sum("process_request_thread" in each.name for each in threading.enumerate())

    stop = Numbers().serve("127.0.0.1", port := free_ports(1)[0])
    before, idle = busy(), list[socket.socket]()
    try:
        idle += [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_CONNECTIONS + 20)]
        until(lambda: busy() >= MOST_CONNECTIONS, "all places are taken")
        time.sleep(0.5)
        assert busy() <= before + MOST_CONNECTIONS
    finally:
        for each in idle:
            each.close()
    until(lambda: busy() < MOST_CONNECTIONS, "a place is free")
    assert request(f"http://127.0.0.1:{port}", "GET", "/metrics", Host="localhost")[0] == 200
    stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
def test_the_metrics_have_the_same_guard(host: str) -> None:
    numbers, (port,) = Numbers(), free_ports(1)
    numbers.iteration.set(7)
    stop = numbers.serve(host, port)
    asked = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
    try:
        for name, code in {
            "evil.example": 200 if host == "0.0.0.0" else 421,
            f"127.0.0.1.evil.example:{port}": 200 if host == "0.0.0.0" else 421,
            f"localhost:{port}": 200,
            f"{asked}:{port}": 200,
        }.items():
            got, _, content = request(f"http://{asked}:{port}", "GET", "/metrics", Host=name)
            assert (got, b"byzpg_iteration 7.0" in content) == (code, code == 200), name
        with pytest.raises(ValueError, match=f"cannot serve metrics on {host}:{port}: Address already in use"):
            Numbers().serve(host, port)
    finally:
        stop()
    numbers.serve(host, port)()  # the port is free again


def test_a_port_in_use_or_none_at_all_gives_one_clear_error(server: Monitor, manifest: Manifest) -> None:
    port = urlsplit(server.url).port
    assert port is not None

    async def no_answers() -> Statuses:
        return dict.fromkeys(NAMES)

    @asynccontextmanager
    async def source() -> AsyncIterator[Ask]:
        yield no_answers

    with pytest.raises(
        ValueError, match=rf"cannot serve the status page on 127\.0\.0\.1:{port}: Address already in use"
    ):
        Monitor(manifest, 0, source, host="127.0.0.1", port=port)
    for host, wrong in (("127.0.0.1", 99_999), ("no such host", 0), ("203.0.113.1", 0)):
        with pytest.raises(ValueError, match=r"cannot serve the status page on .* Choose another host or port"):
            Monitor(manifest, 0, source, host=host, port=wrong)


def test_a_missing_key_is_reported_before_anything_starts(manifest: Manifest, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="private key of alice cannot be read"):
        serve(manifest, 0, tmp_path / "alice.key", host="127.0.0.1", port=0, on_ready=lambda url: pytest.fail("ready"))


def test_a_poll_that_fails_ends_the_monitor_with_its_error(manifest: Manifest) -> None:
    @asynccontextmanager
    async def source() -> AsyncIterator[Ask]:
        async def ask() -> Statuses:
            raise RuntimeError("broken")

        yield ask

    with pytest.raises(RuntimeError, match="broken"), Monitor(manifest, 0, source, host="127.0.0.1", port=0) as monitor:
        monitor.wait()


# The page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("the page is tested in a real browser, and there is none: apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        yield launched
        launched.close()


@dataclass
class Visits:
    """Opens pages, which must have no errors and request nothing but the page and its data."""

    browser: Browser

    def __post_init__(self) -> None:
        self.troubles: list[str] = []
        self.requests: set[str] = set()
        self.contexts: list[Any] = []

    def open(self, url: str, width: int = 1280, scheme: Any = "light") -> Page:
        context = self.browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        context.set_default_timeout(1000 * PATIENCE)
        self.contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: self.requests.add(request.url))
        page.on("console", lambda message: self.troubles.append(message.text))
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#members tbody tr")
        return page

    def close(self) -> None:
        while self.contexts:
            self.contexts.pop().close()


@contextmanager
def watched(manifest: Manifest, statuses: Statuses, visits: Visits) -> Iterator[Monitor]:
    """As `monitored`, but closes the pages before their monitor ends, so that no request fails."""
    with monitored(manifest, statuses) as monitor:
        yield monitor
        visits.close()


@pytest.fixture
def visits(browser: Browser) -> Iterator[Visits]:
    expect.set_options(timeout=1000 * PATIENCE)
    opened = Visits(browser)
    yield opened
    opened.close()
    assert not opened.troubles
    urls = {url for url in opened.requests if not url.startswith("data:")}
    assert {urlsplit(url).path for url in urls} <= {"/", "/status.json"}
    assert {urlsplit(url).hostname for url in urls} == {"127.0.0.1"}
    assert len({urlsplit(url).port for url in urls}) == 1


def row(page: Page, name: str) -> dict[str, str]:
    """The cells of a member's row, by column."""
    return page.evaluate(
        "name => Object.fromEntries([...document.querySelectorAll(`#members tr[data-member='${name}'] "
        "td:not(.group)`)].map(cell => [cell.dataset.label, cell.innerText.replace(/\\s+/g, ' ').trim()]))",
        name,
    )


CONTRASTS = """() => {
  const parse = colour => colour.match(/[\\d.]+/g).map(Number);
  const over = (front, back) => front.slice(0, 3).map((c, i) => c * (front[3] ?? 1) + back[i] * (1 - (front[3] ?? 1)));
  const back = node => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const light = colour => colour.map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
    if (!own || node.closest("script, style") || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), inside = node.closest("svg");
    const text = parse(inside ? style.fill : style.color), under = back(inside ? inside.parentElement : node);
    const [low, high] = [light(over(text, under)), light(under)].sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), node.textContent.trim().slice(0, 40)]);
  }
  return [light(back(document.body)), found];
}"""


def check_looks(page: Page) -> None:
    """All text is readable in both colour schemes, and nothing overflows the page."""
    lightness = []
    for _ in range(2):
        back, found = page.evaluate(CONTRASTS)
        lightness.append(back > 0.5)
        assert len(found) > 60
        assert [words for ratio, words in found if ratio < 4.5] == []
        page.click("#theme")
        page.mouse.move(0, 0)
    assert sorted(lightness) == [False, True]
    check_width(page)


def check_width(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    wide = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && e.getClientRects().length "
        "&& !e.closest('thead') && e.getBoundingClientRect().right > innerWidth + 0.5)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


def test_hostile_texts_stay_texts(manifest: Manifest, visits: Visits) -> None:
    evil = {name: {"rejected": {EVIL: 1, "evil": 10**9}, "weight": 9, "equivocations": 1} for name in NAMES}
    curve = [[at, 1e14 * (-1) ** at] for at in range(1, 900)]
    statuses: Statuses = {name: parsed(index) for index, name in enumerate(NAMES)}
    statuses["erin"] = parsed(4, rehearsal=EVIL, task=EVIL, others=evil, curve=curve, step_seconds=[1e14] * 300)
    with watched(manifest, statuses, visits) as monitor:
        for width in (1280, 360):
            page = visits.open(monitor.url, width)
            expect(page.locator("#members .badge.odd")).to_have_text(f"rehearsal: {EVIL[:LONGEST_TEXT].strip()}")
            assert page.locator("img").count() == 0
            assert page.locator("script").count() == 1
            assert "owned" not in page.title()
            # One attacker accuses all others, and its word alone confirms nothing.
            assert row(page, "bob")["Equivocations"] == "claimed 1 × only by erin"
            assert row(page, "erin")["Equivocations"].startswith("caught 60 ×")
            assert row(page, "bob")["Weight of its gradients"].startswith("34 %")
            # It does not stretch the scales either.
            highest = page.evaluate(
                "Math.max(...[...document.querySelectorAll('#chart text[text-anchor=end]')]"
                ".map(e => Number(e.textContent.replace(',', '').replace('−', '-'))))"
            )
            assert 400 <= highest <= 1000
            assert page.inner_text("#scale").endswith("ms")
            # Only accusations by more than f members count towards the banner.
            assert page.locator("#beyond").is_hidden()
            check_width(page)


def test_a_stall_is_a_red_banner_that_names_the_missing_members(manifest: Manifest, visits: Visits) -> None:
    stalled = {"state": "stalled", "waiting_for": ["dave", "erin"]}
    statuses: Statuses = {name: parsed(index, **stalled) for index, name in enumerate(NAMES[:3])}
    statuses |= {"dave": None, "erin": None}
    with watched(manifest, statuses, visits) as monitor:
        page = visits.open(monitor.url)
        expect(page.locator("#stalled strong")).to_have_text("Stalled: no message from dave and erin")
        assert "alice, bob and carol report that they cannot continue" in page.inner_text("#stalled")
        assert "needs messages from 4 of 5 members" in page.inner_text("#stalled")
        red, green, blue = re.findall(r"\d+", page.evaluate("getComputedStyle($('stalled')).backgroundColor"))
        assert int(red) > 3 * max(int(green), int(blue))
        assert page.inner_text("#unreached strong") == "The monitor gets no answer from dave and erin"
        assert page.inner_text("#state") == "Stalled"
        check_looks(page)
        statuses |= {name: parsed(index) for index, name in enumerate(NAMES)}
        expect(page.locator("#stalled")).to_be_hidden()
        expect(page.locator("#unreached")).to_be_hidden()
        # What only one member reports may be false.
        statuses["erin"] = parsed(4, state="stalled", waiting_for=["bob"])
        expect(page.locator("#stalled")).to_contain_text("it may be false")
        assert page.inner_text("#state") == "Training"
        assert page.locator("#beyond").is_hidden()
        statuses["dave"] = None
        expect(page.locator("#beyond")).to_contain_text("dave is absent; erin has equivocated. That makes 2, and")


def test_members_that_have_finished_and_left_are_no_alarm(manifest: Manifest, visits: Visits) -> None:
    over = {"state": "finished", "iteration": 300}
    statuses: Statuses = {name: parsed(index, **over) for index, name in enumerate(NAMES)}
    with watched(manifest, statuses, visits) as monitor:
        statuses |= dict.fromkeys(NAMES)
        until(lambda: not any(monitor.board.as_data()["statuses"].values()), "all have left")
        page = visits.open(monitor.url)
        expect(page.locator("#state")).to_have_text("Finished")
        assert page.locator("#unreached").is_hidden()
        assert page.locator("path.line.mean").count() == 5
        assert row(page, "bob")["Presence"] == "finished and has left"


@pytest.mark.slow
def test_a_stale_page_says_so(manifest: Manifest, visits: Visits) -> None:
    with monitored(manifest, {name: parsed(index) for index, name in enumerate(NAMES)}) as monitor:
        page = visits.open(monitor.url)
        expect(page.locator("#pulse")).to_contain_text("live")
        assert page.locator("#stale").is_hidden()
    expect(page.locator("#stale strong")).to_have_text("This page is stale: the monitor does not answer")
    expect(page.locator("#pulse")).to_have_text("stale")
    assert all("ERR_CONNECTION_REFUSED" in trouble for trouble in visits.troubles)
    visits.troubles.clear()


@pytest.mark.slow
def test_only_what_has_changed_is_drawn_again(server: Monitor, visits: Visits) -> None:
    page = visits.open(server.url)
    page.wait_for_selector("path.line.mean")
    page.evaluate(
        "() => { window.changes = []; new MutationObserver(found => changes.push(...found.map(each => each.target)))"
        ".observe(document.querySelector('main'), { subtree: true, childList: true, attributes: true }) }"
    )
    asked = page.evaluate("heardAt")
    page.wait_for_function("asked => heardAt > asked + 1500", arg=asked)
    assert page.evaluate("changes.map(each => each.outerHTML.slice(0, 80))") == []


# Real members


@dataclass
class Federation:
    """Members and a monitor."""

    url: str
    dave: Forked
    monitor: subprocess.Popen[str]


# Most members share one process, so that programs are loaded and compiled once.
MEMBERS = """
import asyncio, sys
from pathlib import Path
import numpy as np
from byzpg.federation.members import Peer
from byzpg.live.manifest import Manifest
from byzpg.live.member import Options, take_part

folder, names = Path(sys.argv[1]), sys.argv[2:]
manifest = Manifest.load(folder / "federation.toml")
settings = manifest.settings()
Peer(settings.federation(), settings.schedule(), 0, np.zeros(2, np.uint32)).warm_up()

async def main():
    attacks = {"erin": "equivocate"}
    options = [Options(folder / f"{name}.key", folder / name, attack=attacks.get(name)) for name in names]
    await asyncio.gather(*(take_part(manifest, name, each) for name, each in zip(names, options)))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    made_manifest(folder, free_ports(len(NAMES)))
    path = folder / "federation.toml"
    command = [sys.executable, "-m", "byzpg", "monitor", str(path), "--name", "alice", "--port", "0"]
    monitor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started: list[Forked] = []

    def start(name: str, *arguments: object, **options: Any) -> Forked:
        with (folder / f"{name}.out").open("w") as output:
            started.append(Forked(*arguments, stdout=output, **options))
        return started[-1]

    def ready() -> bool:
        assert members.poll() is None, (folder / "members.out").read_text()
        log = folder / NAMES[0] / "log.jsonl"
        return log.exists() and '"ready"' in log.read_text()

    try:
        members = start("members", folder, *(name for name in NAMES if name != "dave"), program=MEMBERS)
        # Dave finds the programs of the others in the cache.
        until(ready, "the first member is ready")
        dave = start("dave", "peer", path, "--name", "dave", "--directory", folder / "dave")
        assert monitor.stdout is not None
        found = re.search(r"http://\S+", monitor.stdout.readline())
        assert found
        yield Federation(found[0], dave, monitor)
    finally:
        monitor.kill()
        monitor.communicate()
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_real_members_on_the_page(federation: Federation, visits: Visits) -> None:
    page = visits.open(federation.url)
    names = page.locator("#members tbody tr th b").all_inner_texts()
    assert names == list(NAMES)
    page.wait_for_function("() => data.statuses.alice && data.statuses.alice.iteration >= 5")

    # Every member has a curve with points.
    expect(page.locator("path.line.mean")).to_have_count(5)
    for path in page.locator("path.line.mean").all():
        assert len(re.findall(r"[ML][\d.]+ [\d.]+", path.get_attribute("d") or "")) >= 3
    assert page.locator("path.goal").count() == 1
    expect(page.locator("#state")).to_have_text("Training")
    assert re.fullmatch(r"iteration \d+ of 25,000", page.inner_text("#iteration"))
    assert "CartPole-v1" in page.inner_text("#task")

    # All members are present, and one is caught.
    expect(page.locator("#members tr[data-member=erin] .badge.red")).to_contain_text("caught")
    expect(page.locator("#members tr[data-member=erin] .badge.odd")).to_have_text("rehearsal: Equivocate()")
    expect(page.locator("#members .badge.red")).to_have_count(1)
    for name in NAMES[:4]:
        expect(page.locator(f"#members tr[data-member={name}] .presence")).to_have_text("present")
        assert row(page, name)["Equivocations"] == "none"
        assert re.match(r"\d+(\.\d)? %", row(page, name)["Weight of its gradients"])
    expect(page.locator("#matrix td[data-kind=yes]")).to_have_count(20)
    expect(page.locator("#links")).to_have_text("All 20 reported links are up.")
    assert page.locator("#steps path.line").count() == 5
    # On a busy machine a member may be late for a moment.
    expect(page.locator("#unreached")).to_be_hidden()
    expect(page.locator("#beyond")).to_be_hidden()

    # One member is killed. The messages of the one that equivocated do not count either, so there are too few.
    federation.dave.kill()
    federation.dave.wait()
    expect(page.locator("#members tr[data-member=dave] .presence")).to_have_text("no answer")
    expect(page.locator("#unreached strong")).to_have_text("The monitor gets no answer from dave")
    # A member that is a round ahead of the others misses their messages as well.
    expect(page.locator("#stalled strong")).to_have_text(re.compile("Stalled: no message from .*dave and erin"))
    expect(page.locator("#matrix td[aria-label='alice is not connected to dave']")).to_have_text("✕")
    expect(page.locator("path.line.mean[data-member=dave].gone")).to_have_count(1)
    assert row(page, "dave")["State"].endswith("its last answer")

    check_looks(page)
    narrow = visits.open(federation.url, 360, "dark")
    narrow.wait_for_selector("path.line.mean")
    assert not narrow.evaluate("matchMedia('(prefers-color-scheme: light)').matches")
    check_looks(narrow)


@pytest.mark.slow
def test_the_monitor_ends_cleanly_when_told_to(federation: Federation) -> None:
    federation.monitor.send_signal(signal.SIGTERM)
    output, errors = federation.monitor.communicate()
    assert (federation.monitor.returncode, output, errors) == (0, "", "")


def test_an_interrupt_ends_it_too(tmp_path: Path) -> None:
    """The federation can be monitored even if no member is there."""
    made = made_manifest(tmp_path, free_ports(len(NAMES)))
    data: list[Any] = []

    def ready(url: str) -> None:
        data.append(
            until(
                lambda: (got := json.loads(request(url, "GET", "/status.json")[2]))["age"] is not None and got, "a poll"
            )
        )
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    serve(made, 0, tmp_path / "alice.key", host="127.0.0.1", port=0, on_ready=ready)
    assert signal.getsignal(signal.SIGINT) is before
    assert data[0]["statuses"] == dict.fromkeys(NAMES)


@pytest.mark.slow
def test_no_thread_waits_for_grpcs_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC ends its runtime with the last channel, even in the garbage collector, and waits for its thread there."""
    made = made_manifest(tmp_path, free_ports(len(NAMES)))
    waited_for: list[str] = []
    join = threading.Thread.join

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        waited_for.append(thread.name)
        join(thread, timeout)

    async def use_a_channel() -> None:
        await open_channel(made, 0, read_key(tmp_path / "alice.key", made.members[0]), 1, 2**20).close()

    gc.collect()  # the garbage of earlier tests
    gc.freeze()  # what earlier tests keep is large, and need not be scanned again
    monkeypatch.setattr(threading.Thread, "join", noted)
    with ThreadPoolExecutor(1) as pool:  # this thread has the browser's event loop
        for _ in range(20):  # sometimes gRPC's thread ends before another could wait for it
            pool.submit(lambda: asyncio.run(use_a_channel())).result()
            gc.collect()
    assert [name for name in waited_for if "poll" in name] == []
