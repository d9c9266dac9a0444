"""The page of an audit, from findings that nobody trained for: its words, its numbers, and how a browser shows it."""

import json
import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import sync_playwright

from byzpg.config import Config
from byzpg.experiments.audit import Findings, Measured, Plan, RuleFindings
from byzpg.experiments.report.audit import in_words, leaderboard, summary, verdict, write_audit
from byzpg.robust.adaptive import Adaptive
from byzpg.robust.attacks import ALIE

RULE = "NNM(TrimmedMean())"
FOUND = str(Adaptive(pull=1.4, start=20.0))
ABOUT = {
    "command": "byzpg audit --aggregator '<u>mine</u>'",
    "versions": {"byzpg": "0.3.0"},
    "python": "3.12.3",
    "machine": "Linux aarch64",
    "devices": ["a small device"],
}

# What is wider than the page, outside of boxes that scroll.
WIDE = """
[...document.querySelectorAll("main *, header *")].filter(e => !e.closest(".scroll, .canvas, pre")
  && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))
"""


def measured(rule: str, attack: str | None, lost: float, *, attackers: int = 3, **changes: Any) -> Measured:
    """Four seeds that lose about this share and reach the level later by it, or never."""
    progress = np.arange(20.0, 401, 20)
    shares = lost + np.array([-0.02, -0.01, 0.01, 0.02])
    learned = 20 + 480 * np.minimum(progress / 200, 1)
    returns = 20 + (1 - shares[:, None]) * (learned - 20)
    slowdown = np.where(shares < 0.5, 1 + shares, np.inf)
    given = Measured(rule, attack, 3, attackers, 2000, progress, returns, shares, shares, slowdown)
    return replace(given, **changes)


def of_rule(rule: str, lost: float | None, known: float = 0.05) -> RuleFindings:
    """A rule whose worst attack costs this share of the learning; None: no attack was tried."""
    without = measured(rule, None, 0.0, attackers=0)
    if lost is None:
        return RuleFindings(rule, without, None, None, ())
    return RuleFindings(
        rule,
        without,
        measured(rule, FOUND, lost),
        measured(rule, "ALIE()", known),
        searched=((FOUND, lost + 0.3), *((f"Adaptive(pull={number}.5)", 0.1) for number in range(45)), ("ALIE()", 0.0)),
        breaking=tuple(measured(rule, FOUND, lost * n / 3, attackers=n, num_byzantine=min(n, 3)) for n in range(1, 5)),
        constants={"measured": 1463.0, "attack": "AvgZero()", "bound": None},
    )


def findings(*rules: RuleFindings, **changes: Any) -> Findings:
    given = Findings(
        plan=Plan(
            Config(env="CartPole-v1", algorithm="DecByzPG", trajectories=400, num_byzantine=3),
            tuple(each.rule for each in rules),
            search_seeds=2,
            report_seeds=4,
        ),
        honest=measured("Mean()", None, 0.0, attackers=0),
        rules=rules,
        beside=(),
        level=450.0,
        unit="trajectories",
        generations=3,
        candidates=60,
        cut_short=(),
        seconds=500.0,
    )
    return replace(given, **changes)


def text_of(found: Findings, path: Path) -> str:
    """The words of the page."""
    write_audit(found, path, ABOUT)
    text = path.read_text()
    shown = re.sub(r"<(style|script)>.*?</\1>", "", text, flags=re.DOTALL)
    shown = re.sub("<svg.*?</svg>", "", shown, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub("<[^>]*>", " ", shown)))


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (0.005, "NNM(TrimmedMean()): no attack found that harms it beyond chance. The worst one costs 0 % [−1, 2]"),
        (
            0.3,
            "NNM(TrimmedMean()) keeps learning: the worst attack found costs 30 % [28, 32] of the learning, and it "
            "takes 1.3 times as long to reach the level of 450; worst seed 32 %.",
        ),
        (
            0.7,
            "NNM(TrimmedMean()) is crippled: the worst attack found costs 70 % [68, 71] of the learning, and it does "
            "not reach the level of 450; worst seed 72 %.",
        ),
        (1.0, "NNM(TrimmedMean()): total loss. The worst attack found costs 100 % [98, 102] of the learning"),
    ],
)
def test_every_verdict_has_its_words(lost: float, words: str) -> None:
    rule = of_rule(RULE, lost)
    assert verdict(findings(rule), rule).startswith(words)


def test_without_attackers_no_attack_is_found(tmp_path: Path) -> None:
    rule = of_rule(RULE, None)
    found = findings(rule, candidates=0, generations=0)
    assert verdict(found, rule) == "NNM(TrimmedMean()) is untested: the budget was over before an attack was tried."
    plan = replace(found.plan, config=replace(found.plan.config, num_byzantine=0))
    page = text_of(replace(found, plan=plan), tmp_path / "audit.html")
    assert "No attack found: nobody attacks, because f = 0." in page
    assert "Worst attack found" not in page
    assert "untested" in page
    assert summary(found)["rules"][0]["lost"] is None


def test_the_page_tells_all_that_was_found(tmp_path: Path) -> None:
    odd = "my_parts:Rule(name='<b>&')"
    first, last, beside = of_rule(odd, 0.1), of_rule("Mean()", 1.0), replace(of_rule("Krum()", 0.2), known=None)
    parts = ("the search", "other rules")
    path = tmp_path / "audit.html"
    page = text_of(findings(last, first, beside=(beside,), cut_short=parts), path)
    source = path.read_text()
    assert not re.search("<[biu]>", source)
    assert not re.search(r"https?://(?!www\.w3\.org)|<link(?! rel='icon')|<script src|@import", source)
    assert not re.search(r"\b(nan|inf)\b", page, flags=re.IGNORECASE)
    in_order = (
        f"Of 2 audited rules, {odd} ranks first and Mean() last",
        "Audited: CartPole-v1, DecByzPG, K = 13, f = 3, momentum 0.8, 400 trajectories per agent; attackers want the",
        "The search trained 60 candidates, the known attacks and 3 generations of adaptive ones, on seeds 500 to 501,",
        "All numbers below are of seeds 2000 to 2003, which it never saw.",
        "The budget did not suffice for: all generations of the search the rules beside",
        "Rules by their worst attack, the least harmed first (4 seeds).",
        f"{odd} 3 10 [8, 12] 10 [8, 12] 1.1× [1.1×, 1.1×] 12 adaptive 0 [−2, 2] slowed",
        "Mean() 3 100 [98, 102] 100 [98, 102] never [never, never] 102 adaptive 0 [−2, 2] lost",
        "Not audited themselves: trained under the attack found against Mean() Krum() 3 20 [18, 22]",
        "not audited Reading the table",
        "Attackers send the honest mean minus 1.4 times itself to all receivers, from iteration 20 on.",
        f"--attack '{FOUND}' --num-seeds 4 --seed 2000 --trajectories 400 --aggregator",
        "Worst known attack: ALIE()",
        "--attack 'ALIE()'",
        "Mean() (f = 3) loses half of the learning or more from 2 attackers on.",
        "4, more than f 133",
        "A large constant alone does not mean harm",
        "Mean() 1463 none known AvgZero()",
        "Mean(): the worst 40 of 47 attacks Harm on the seeds of the search",
        ABOUT["command"],
        "byzpg 0.3.0; Linux aarch64; a small device. All runs of this command took 8 min.",
    )
    places = [page.find(words) for words in in_order]
    assert -1 not in places, in_order[places.index(-1)]
    assert places == sorted(places)


def test_attackers_that_want_an_action(tmp_path: Path) -> None:
    def wanted(each: Measured, share: float) -> Measured:
        return replace(each, targeted=np.full(4, share))

    rule = of_rule(RULE, 0.3)
    assert rule.worst is not None
    rule = replace(rule, without=wanted(rule.without, 0.5), worst=wanted(rule.worst, 0.75), known=None)
    found = findings(rule)
    found = replace(found, plan=replace(found.plan, goal="target", action=1))
    page = text_of(found, tmp_path / "audit.html")
    words = "The trained policy takes action 1 in 75 % [75, 75] of the steps; without attackers, 50 % [50, 50] of the"
    assert words in page
    assert "attackers want the action that attackers want" not in page
    assert f"{RULE} 3 30 [28, 32] 30 [28, 32] 1.3× [1.3×, 1.3×] 32 75 [75, 75] adaptive 0 [−2, 2] slowed" in page


def test_a_known_attack_may_be_the_worst(tmp_path: Path) -> None:
    chosen, unlucky = of_rule(RULE, 0.2), of_rule(RULE, 0.2, known=0.4)
    chosen = replace(chosen, worst=chosen.known)
    page = text_of(findings(chosen), tmp_path / "audit.html")
    assert "It is a known attack: the search found none that does more harm." in page
    assert "Worst known attack" not in page
    row = summary(findings(chosen))["rules"][0]
    assert row["worst_attack"] == row["known_attack"] == "ALIE()"
    page = text_of(findings(unlucky), tmp_path / "audit.html")
    assert "On these seeds, the known attack does more harm than the one that was chosen" in page


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (
            ALIE(),
            "A little is enough: attackers send the honest mean minus z standard deviations (Baruch et al. 2019).",
        ),
        (Adaptive(), "Attackers send the honest mean to all receivers."),
        (
            Adaptive(hide=-0.5, drift=2.0, own=0.3, actor=0.5, period=8.0, duty=0.25, silent=1.0),
            "Attackers send the honest mean plus 0.5 standard deviations in every coordinate, plus 2 honest spreads in "
            "a direction that never changes, plus 0.3 times their own deviation from it, to all receivers, 0.5 times "
            "that far for the policy, in 2 of every 8 iterations; between strikes they send nothing.",
        ),
        (
            Adaptive(noise=100.0, reach=0.5, mirror=-1.0, equivocates=True, target="both"),
            "Attackers send the honest mean plus 100 honest spreads of noise as gradients and as parameters to 50 % of "
            "the receivers, with other noise for each, and −1 times that deviation to the others.",
        ),
    ],
)
def test_an_attack_in_words(attack: Any, words: str) -> None:
    assert in_words(attack) == words


def test_a_leaderboard_ranks_by_what_is_lost() -> None:
    long = f"Bucketing({'NNM(' * 30}RFA(){')' * 30}, size=2)"
    several = [of_rule("Mean()", 1.0), of_rule("RFA()", 0.2), of_rule("Zeno()", None), of_rule(long, 0.6)]
    numbers = summary(findings(*several, beside=(of_rule("Krum()", 0.0),)))
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers
    title, _, head, _, *rows = leaderboard(numbers).splitlines()
    assert title == "CartPole-v1, DecByzPG, K = 13, f = 3, momentum 0.8:"
    assert head.endswith("| without attack | worst known | 1 to 4 attackers |")
    assert max(map(len, rows)) <= 120
    assert rows[0] == "| `RFA` | adaptive | 20 % [18, 22] | 22 % | 1.2× | 0 % | ALIE, 5 % | 7, 13, 20, 27 % |"
    assert [row.split("`")[1][:6] for row in rows[1:]] == ["Bucket", "Mean", "Zeno"]
    assert rows[2].split(" | ")[4] == "never"
    assert rows[3] == "| `Zeno` | none tried | – | – | – | 0 % | – | – |"


def test_the_page_of_one_rule_begins_with_its_worst_attack(tmp_path: Path) -> None:
    page = text_of(findings(of_rule("RFA()", 0.2)), tmp_path / "audit.html")
    assert page.index("Worst attack found:") < page.index("Rules by their worst attack")


def test_a_leaderboard_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    one = replace(of_rule("RFA()", 0.2), known=None, breaking=())
    _, _, head, _, row = leaderboard(summary(findings(one))).splitlines()
    assert head.endswith("| without attack |")
    assert row.endswith("| 1.2× | 0 % |")
    page = text_of(findings(one), tmp_path / "audit.html")
    assert "The search trained 60 candidates, 3 generations of adaptive ones, on seeds" in page


def test_every_number_is_in_its_place() -> None:
    lost = np.array([0.1, 0.1, 0.1, 0.5])  # whose worst seed lies beyond the interval of the mean
    worst = replace(measured("RFA()", "my_parts:AnAttackWithALongName()", 0.2), lost=lost, lost_at_end=lost / 2)
    one = replace(of_rule("a:b('|')", 0.2), worst=worst, without=measured("RFA()", None, 0.03, attackers=0))
    (row,) = summary(findings(one))["rules"]
    assert row["lost"]["value"] == pytest.approx(0.2)
    assert row["lost_at_end"]["value"] == pytest.approx(0.1)
    assert row["worst_seed"] == 0.5
    assert row["without_attack"]["value"] == pytest.approx(0.03)
    assert row["known_lost"]["value"] == pytest.approx(0.05)
    assert [each["attackers"] for each in row["by_attackers"]] == [1, 2, 3, 4]
    assert row["constants"]["measured"] == 1463.0
    line = leaderboard(summary(findings(one))).splitlines()[4]
    assert line.startswith("| `a:b('/')` | AnAttackWithALo… | 20 % [10, ")
    assert "| 50 % | 1.2× | 3 % | ALIE, 5 % |" in line


def test_a_browser_shows_it_at_all_widths_and_in_both_themes(tmp_path: Path) -> None:
    path = tmp_path / "audit.html"
    long = "my_parts_with_a_long_name:TheRuleThatHasAVeryLongNameIndeed()"
    write_audit(findings(of_rule(long, 0.3), beside=(of_rule("Krum()", 0.2),)), path, ABOUT)
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("the page is tested in a real browser, and there is none: apt-get install chromium")
    requests: list[str] = []
    troubles: list[str] = []
    backs = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for width, scheme in ((360, "light"), (1280, "dark")):
            context: Any = browser.new_context(
                color_scheme="dark" if scheme == "dark" else "light", viewport={"width": width, "height": 800}
            )
            page = context.new_page()
            page.on("request", lambda request: requests.append(request.url))
            page.on("console", lambda message: troubles.append(message.text))
            page.on("pageerror", lambda error: troubles.append(str(error)))
            page.goto(path.as_uri())
            page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate(WIDE) == []
            assert page.locator("svg[role=img]").count() == 2
            backs.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        browser.close()
    assert len(set(backs)) == 2
    assert not troubles
    assert {url for url in requests if not url.startswith("data:")} == {path.as_uri()}
