"""The page of an audit: a verdict in words, the worst attack on each rule, and the numbers behind both."""

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from byzpg import _registry
from byzpg._files import write_atomically
from byzpg.config import REPORTED_SEED, Settings
from byzpg.experiments.audit import GOALS, LEVEL, SEARCH_SEED, SELECTION_SEED, Findings, Measured, RuleFindings
from byzpg.experiments.figures import COLOURS, Curve, curves_by_colour, lost_by_attackers, short_number
from byzpg.experiments.report.drawings import panels
from byzpg.experiments.report.frame import command_block, folded, framed, guide, made_by, row_of, table
from byzpg.experiments.report.wording import bullets, digits, duration, percent, times, typeset, with_interval
from byzpg.experiments.summaries import Estimate, estimate
from byzpg.robust.adaptive import Adaptive
from byzpg.robust.attacks import Attack

MOST_SHOWN = 40  # attacks of a rule that are listed
BROKEN = 0.5  # the share of learning whose loss counts as broken
GREEN, BLUE, ORANGE, BLACK = COLOURS[2], COLOURS[0], COLOURS[1], COLOURS[6]
LEGEND = {
    "honest federation, which averages": BLACK,
    "the rule without attackers": GREEN,
    "worst known attack": BLUE,
    "worst attack found": ORANGE,
}
INTERVAL = "[95\N{NO-BREAK SPACE}%]"
NUMBERS = (f"Lost, % {INTERVAL}", f"Lost at the end, % {INTERVAL}", f"Slowdown {INTERVAL}", "Worst seed, %")
GUIDE = {
    "Lost": "The share of learning that is lost: the area between the learning curve of the honest federation and that "
    "of the run, over the area between the former and the return at which it starts. 0 % is no harm, and 100 % is a "
    "federation that never learns.",
    "Lost at the end": "The same for the return over the last tenth of training.",
    "Slowdown": "How many times as long as the honest federation it takes to reach the level, which is "
    f"{percent(LEVEL)} % of "
    "what the honest federation learns: the median over seeds. “Never” means not within the run.",
    "Worst seed": "The seed that lost most.",
    "[Brackets]": "95 % intervals, bootstrapped over seeds.",
}
# What the page lacks if the budget did not suffice for a part of the audit.
CUT_SHORT = {
    "known attacks": "the known attacks, none of which was tried",
    "the search": "all generations of the search",
    "the best on more seeds": "the choice among the best candidates on more seeds: the worst one on the few seeds of "
    "the search is reported",
    "more attackers": "other numbers of attackers",
    "theory": "the constants of all rules",
    "other rules": "the rules beside",
}


def write_audit(findings: Findings, path: Path, about: Mapping[str, Any]) -> None:
    """Write what an audit found as one self-contained HTML page.

    Args:
        findings: What the audit found.
        path: The file to write.
        about: The provenance: command (as one text), versions, python, machine and devices.
    """
    text = _page(findings, about)
    write_atomically(path, lambda file: file.write(text.encode()))


# Numbers


def summary(findings: Findings) -> dict[str, Any]:
    """The numbers of the page's table, ready for JSON: a row per rule in `rules`, the audited ones first.

    Shares are fractions. A slowdown is None if fewer than half of the seeds reach the level, and all numbers of an
    attack are None if none was tried. Rules that were trained under the attack on another rule have `searched` False
    and no verdict.
    """
    settings = _settings(findings)
    shared = {
        "task": settings.env,
        "algorithm": settings.algorithm,
        "K": settings.num_agents,
        "momentum": settings.momentum,
        "seeds": findings.plan.report_seeds,
        "goal": findings.plan.goal,
    }

    def row(found: RuleFindings, *, searched: bool) -> dict[str, Any]:
        worst, known = found.worst, found.known
        numbers = worst.estimates() if worst else {}
        slowdown = numbers["slowdown"].value if worst else None
        return {
            "rule": found.rule,
            **shared,
            "f": found.without.num_byzantine,
            "searched": searched,
            "verdict": found.verdict if searched else None,
            "lost": _as_data(numbers.get("lost")),
            "lost_at_end": _as_data(numbers.get("lost_at_end")),
            "slowdown": slowdown if slowdown is not None and isfinite(slowdown) else None,
            "worst_seed": float(np.max(worst.lost)) if worst else None,
            "worst_attack": worst.attack if worst else None,
            "known_attack": known.attack if known else None,
            "known_lost": _as_data(known.estimates()["lost"]) if known else None,
            "without_attack": _as_data(found.without.estimates()["lost"]),
            "by_attackers": [
                {"attackers": each.num_attackers, "lost": _as_data(each.estimates()["lost"])} for each in found.breaking
            ],
            "constants": dict(found.constants),
        }

    rules = [row(each, searched=True) for each in findings.ranked(findings.rules)]
    return {"rules": rules + [row(each, searched=False) for each in findings.ranked(findings.beside)]}


def _as_data(found: Estimate | None) -> dict[str, float] | None:
    return None if found is None else {"value": found.value, "low": found.low, "high": found.high}


def leaderboard(numbers: Mapping[str, Any]) -> str:
    """The audited rules of a `summary` as Markdown, the least harmed first."""
    rows = [row for row in numbers["rules"] if row["searched"]]
    one = rows[0]
    title = f"{one['task']}, {one['algorithm']}, K = {one['K']}, f = {one['f']}, momentum {one['momentum']:g}"
    head = ["rule", "worst attack", "lost [95 %]", "worst seed", "slowdown", "without attack"]
    lines = [_leaderboard_row(row) for row in rows]
    if any(row["known_attack"] for row in rows):
        head.append("worst known")
        for cells, row in zip(lines, rows, strict=True):
            known = row["known_lost"]
            cells.append(f"{_short(row['known_attack'])}, {percent(known['value'])} %" if known else "–")
    if any(row["by_attackers"] for row in rows):
        most = max(len(row["by_attackers"]) for row in rows)
        head.append(f"1 to {most} attackers")
        for cells, row in zip(lines, rows, strict=True):
            several = ", ".join(percent(each["lost"]["value"]) for each in row["by_attackers"])
            cells.append(f"{several} %" if several else "–")
    for cells in lines:
        cells[0] = f"`{_cut(cells[0].replace('()', '').replace('|', '/'), 111 - len(' | '.join(cells[1:])))}`"
    alignment = ["---", "---", *["---:"] * (len(head) - 2)]
    return f"{title}:\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in (head, alignment, *lines))


def _leaderboard_row(row: Mapping[str, Any]) -> list[str]:
    cells = [row["rule"], "none tried", "–", "–", "–"]
    if row["lost"] is not None:
        cells[1:] = [
            _short(row["worst_attack"]),
            _percent_with_interval(Estimate(**row["lost"])),
            f"{percent(row['worst_seed'])} %",
            "never" if row["slowdown"] is None else times(row["slowdown"]),
        ]
    return [*cells, f"{percent(row['without_attack']['value'])} %"]


def _short(attack: str) -> str:
    return _cut(_family(attack), 16)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _settings(findings: Findings) -> Settings:
    """Of the federation, whose aggregator and f are those of the honest one."""
    return findings.plan.honest(0, 1).resolved()


# Words


def in_words(attack: Attack) -> str:
    """What attackers do, as a sentence.

    Examples:
        >>> print(in_words(Adaptive(pull=1.4, start=20.0)))
        Attackers send the honest mean minus 1.4 times itself to all receivers, from iteration 20 on.
    """
    if not isinstance(attack, Adaptive):
        return _registry.summary(type(attack))
    which = {"gradients": "", "parameters": " as parameters", "both": " as gradients and as parameters"}
    message = f"Attackers send the honest mean{_deviation(attack)}{which[attack.target]} {_receivers(attack)}"
    weights = {"policy": attack.actor, "critic": attack.critic}
    weighted = [f"{weight:g} times that far for the {part}" for part, weight in weights.items() if weight != 1]
    return f"{', '.join([message, *weighted])}{_timing(attack)}."


def _deviation(attack: Adaptive) -> str:
    """What is added to the honest mean."""
    parts = (
        (-attack.pull, "times itself"),
        (-attack.against, "honest spreads in its own direction"),
        (-attack.hide, "standard deviations in every coordinate"),
        (attack.drift, "honest spreads in a direction that never changes"),
        (attack.noise, "honest spreads of noise"),
        (attack.own, "times their own deviation from it"),
    )
    told = [f" {'plus' if factor > 0 else 'minus'} {abs(factor):g} {of}" for factor, of in parts if factor]
    return ",".join([*told, ""] if len(told) > 1 else told)


def _receivers(attack: Adaptive) -> str:
    if not attack.equivocates:
        return "to all receivers"
    apart = ", with other noise for each" if attack.noise else ""
    if attack.reach == 1 or attack.mirror == 1:
        return f"to all receivers{apart}"
    others = f"{typeset(f'{attack.mirror:g}')} times that deviation" if attack.mirror else "the honest mean itself"
    return f"to {percent(attack.reach)} % of the receivers{apart}, and {others} to the others"


def _timing(attack: Adaptive) -> str:
    parts = [f"from iteration {attack.start:g} on"] if attack.start > 0 else []
    strikes = ceil(attack.duty * attack.period)
    if strikes < attack.period:
        parts.append(f"in {strikes} of every {attack.period:g} iterations")
    if parts:
        return f", {', '.join(parts)}" + "; between strikes they send nothing" * (
            attack.silent > 0.5 and strikes < attack.period
        )
    return ""


def _family(attack: str) -> str:
    """The name of an attack in few words."""
    name = attack.partition("(")[0].rpartition(":")[2]
    return "adaptive" if name == Adaptive.__name__ else name


def _percent_with_interval(found: Estimate) -> str:
    return f"{percent(found.value)} % [{percent(found.low)}, {percent(found.high)}]"


def _lost(measured: Measured) -> str:
    return f"{_percent_with_interval(measured.estimates()['lost'])} of the learning"


def _pace(findings: Findings, measured: Measured) -> str:
    """When it reaches the level."""
    slowdown, level = measured.estimates()["slowdown"].value, f"the level of {digits(findings.level)}"
    if not isfinite(slowdown):
        return f"it does not reach {level}"
    if slowdown < 1.05:
        return f"it reaches {level} as soon as the honest federation"
    return f"it takes {slowdown:.1f} times as long to reach {level}"


def verdict(findings: Findings, found: RuleFindings) -> str:
    """The verdict on a rule in words."""
    worst, rule = found.worst, found.rule
    if worst is None:
        asked = findings.plan.federation(rule, "AvgZero", 0, 1).resolved()
        if not asked.num_attackers:
            why = "f = 0" if not asked.num_byzantine else "the number of attackers is 0"
            return f"No attack found: nobody attacks, because {why}."
        return f"{rule} is untested: the budget was over before an attack was tried."
    seed = f"worst seed {percent(float(np.max(worst.lost)))} %"
    cost = f"{_lost(worst)}, and {_pace(findings, worst)}"
    without = f"Without attackers, the rule itself costs {_lost(found.without)}."
    match found.verdict:
        case "unharmed":
            text = f"{rule}: no attack found that harms it beyond chance. The worst one costs {_lost(worst)}; {seed}."
        case "lost":
            text = f"{rule}: total loss. The worst attack found costs {cost}; {seed}."
        case kind:
            what = "keeps learning" if kind == "slowed" else "is crippled"
            text = f"{rule} {what}: the worst attack found costs {cost}; {seed}."
    if findings.plan.goal == "target":
        text += f" {_targeted(findings, worst)}; without attackers, {_share_of_action(found.without)}."
    of_worst, plain = (each.estimates()["lost"] for each in (worst, found.without))
    if found.verdict != "unharmed" and of_worst.low <= plain.high:
        without += " The two intervals overlap: more seeds would tell whether it was chance."
    return f"{text} {without}"


def _share_of_action(measured: Measured) -> str:
    assert measured.targeted is not None
    return f"{_percent_with_interval(estimate(measured.targeted, np.mean))} of the steps"


def _targeted(findings: Findings, measured: Measured) -> str:
    return f"The trained policy takes action {findings.plan.action} in {_share_of_action(measured)}"


def _verdicts(findings: Findings) -> list[str]:
    ranked = findings.ranked(findings.rules)
    if len(ranked) == 1 or ranked[0].worst is None:
        return [verdict(findings, ranked[0])]
    tested = [each for each in ranked if each.worst]
    first, last = tested[0], tested[-1]
    return [
        f"Of {len(tested)} audited rules, {first.rule} ranks first and {last.rule} last under their worst attacks.",
        verdict(findings, first),
        verdict(findings, last),
    ]


def _audited(findings: Findings) -> str:
    """What was audited, in one line."""
    settings, rules = _settings(findings), findings.rules
    tolerated = sorted({each.without.num_byzantine for each in rules})
    attackers = sorted({each.worst.num_attackers for each in rules if each.worst})
    goal = findings.plan.goal
    wanted = f"the federation to take action {findings.plan.action}" if goal == "target" else GOALS[goal]
    return ", ".join(
        [
            f"Audited: {settings.env}",
            settings.algorithm,
            f"K = {settings.num_agents}",
            f"f = {' or '.join(map(str, tolerated))}"
            + (f" ({' or '.join(map(str, attackers))} attack)" if attackers not in ([], tolerated) else ""),
            f"momentum {settings.momentum:g}" if settings.momentum else "no momentum",
            f"{settings.length:,} {settings.unit} per agent; attackers want {wanted}.",
        ]
    )


def _seeds(first: int, number: int) -> str:
    return f"{first} to {first + number - 1}" if number > 1 else f"{first}"


def _search(findings: Findings) -> str:
    """How the attacks were found."""
    plan = findings.plan
    if not findings.candidates:
        return f"All numbers are of seeds {_seeds(REPORTED_SEED, plan.report_seeds)}."
    generations = f"{findings.generations} generation{'s' * (findings.generations != 1)}"
    known = "the known attacks and " * any(each.known for each in findings.rules)
    text = f"The search trained {findings.candidates} candidates, {known}{generations} of adaptive ones"
    text += f", on seeds {_seeds(SEARCH_SEED, plan.search_seeds)}"
    if "the best on more seeds" not in findings.cut_short:
        text += f", and the best of them on seeds {_seeds(SELECTION_SEED, 2 * plan.search_seeds)}"
    return f"{text}. All numbers below are of seeds {_seeds(REPORTED_SEED, plan.report_seeds)}, which it never saw."


# The page


def _page(findings: Findings, about: Mapping[str, Any]) -> str:
    rules = findings.rules
    name = rules[0].rule if len(rules) == 1 else f"{len(rules)} aggregation rules"
    lead = "".join(f"<p class='lead'>{escape(text)}</p>" for text in _verdicts(findings))
    top = f"<h1>Audit of {escape(name)}</h1>{lead}<p class='cite'>{escape(f'{_audited(findings)} {_search(findings)}')}"
    facts = {
        "candidates trained": f"{findings.candidates:,}",
        "generations": f"{findings.generations}",
        "seeds behind each number": f"{findings.plan.report_seeds}",
        "time": duration(findings.seconds),
    }
    ranked = findings.ranked(rules)
    ranking = {"The ranking": _ranking(findings, ranked)}  # what a reader of many rules is here for, so first for them
    sections = {
        "": _missing(findings),
        **(ranking if len(rules) > 1 else {}),
        "The worst attack": "".join(_attacks(findings, each) for each in ranked if each.worst),
        "Learning curves": _curves(findings, ranked),
        **(ranking if len(rules) == 1 else {}),
        "Where it breaks": _breaking(findings, ranked),
        "Theory": _theory(ranked),
        "Attacks that were tried": "".join(_tried(findings, each) for each in ranked if each.searched),
        "How to reproduce this": made_by([{"seconds": findings.seconds, **about}]),
    }
    main = [
        f"<section>{f'<h2>{title}</h2>' if title else ''}{content}</section>"
        for title, content in sections.items()
        if content
    ]
    return framed(f"byzpg: audit of {name}", f"{top}</p>", facts, main, "byzpg audit")


def _missing(findings: Findings) -> str:
    if not findings.cut_short:
        return ""
    parts = bullets(CUT_SHORT.get(each, each) for each in findings.cut_short)
    return f"<p>The budget did not suffice for:</p>{parts}"


def _attacks(findings: Findings, found: RuleFindings) -> str:
    worst, known = found.worst, found.known
    assert worst is not None
    title = f"<h3>{escape(found.rule)}</h3>" if len(findings.rules) > 1 else ""
    parts = [_one_attack(findings, worst, "Worst attack found")]
    if known is not None and known.attack == worst.attack:
        parts.append("<p>It is a known attack: the search found none that does more harm.</p>")
    elif known is not None:
        parts.append(_one_attack(findings, known, "Worst known attack"))
        goal = findings.plan.goal
        if np.mean(known.harm(goal)) > np.mean(worst.harm(goal)):
            parts.append(
                "<p>On these seeds, the known attack does more harm than the one that was chosen on the seeds of the "
                "search.</p>"
            )
    return title + "".join(parts)


def _one_attack(findings: Findings, measured: Measured, name: str) -> str:
    assert measured.attack is not None
    attack = _registry.parse("attack", measured.attack)
    assert isinstance(attack, Attack)
    costs = f"It costs {_lost(measured)}, and {_pace(findings, measured)}."
    command = command_block(findings.command(measured))
    replayed = folded("The command that replays it", command, opened=len(findings.rules) == 1)
    return (
        f"<p><strong>{name}:</strong> <code>{escape(measured.attack)}</code>. {escape(in_words(attack))} "
        f"{escape(costs)}</p>{replayed}"
    )


def _curves(findings: Findings, ranked: Sequence[RuleFindings]) -> str:
    honest = findings.honest
    mean = np.mean(honest.returns, axis=0)
    start, gained = float(mean[0]), float(np.max(mean) - mean[0])
    lowest = start - max(gained, 1.0)
    drawn, clipped, used = [], [], dict.fromkeys(LEGEND, False)
    for found in ranked:
        several = dict(zip(LEGEND, (honest, found.without, found.known, found.worst), strict=True))
        if found.known and found.worst and found.known.attack == found.worst.attack:
            several["worst known attack"] = None
        shown = {label: each for label, each in several.items() if each is not None}
        used |= dict.fromkeys(shown, True)
        clipped += [found.rule for each in shown.values() if np.min(np.mean(each.returns, axis=0)) < lowest][:1]
        curves = {LEGEND[label]: Curve(label, each.progress, each.returns) for label, each in shown.items()}
        drawn.append(curves_by_colour(found.rule, curves, findings.level, lowest, findings.unit))
    legend = {label: Line2D([], [], color=LEGEND[label]) for label, is_used in used.items() if is_used}
    caption = (
        f"Training return of honest agents: mean and one standard deviation over {len(honest.returns)} "
        f"seed{'s' * (len(honest.returns) != 1)}. Dotted: the level of {digits(findings.level)}, which counts as "
        "learned."
    )
    if clipped:
        caption += f" A curve leaves the axes: {', '.join(clipped)}."
    shape = "pair" if len(drawn) in (1, 2, 4) else ""
    return panels("Learning curves", drawn, legend, caption, "curves", shape)


def _ranking(findings: Findings, ranked: Sequence[RuleFindings]) -> str:
    targeted = findings.plan.goal == "target"
    head = ["Rule", "f", *NUMBERS, *([f"Wanted action, % of steps {INTERVAL}"] * targeted)]
    head += ["Worst attack", f"Without attackers, % lost {INTERVAL}", "Verdict"]

    def row(found: RuleFindings, *, searched: bool) -> str:
        worst = found.worst
        cells = [escape(found.rule), f"{found.without.num_byzantine}"]
        if worst is None:
            cells += ["–"] * (len(head) - 4)
        else:
            cells += [*_numbers(worst)]
            if worst.targeted is not None and targeted:
                cells.append(with_interval(estimate(worst.targeted, np.mean), percent))
            cells.append(escape(_family(worst.attack or "–")))
        cells.append(with_interval(found.without.estimates()["lost"], percent))
        if not searched:  # harmless is what such a rule is under an attack on another rule
            return row_of(*cells, "not audited")
        tone = {"unharmed": "good", "crippled": "bad", "lost": "bad"}.get(found.verdict, "")
        return row_of(*cells, f"<span class='{tone}'>{found.verdict}</span>")

    beside = "Not audited themselves: trained under the attack found against " + findings.rules[0].rule
    groups = {"Audited" if findings.beside else "": [row(each, searched=True) for each in ranked]}
    if findings.beside:
        groups[escape(beside)] = [row(each, searched=False) for each in findings.ranked(findings.beside)]
    caption = f"Rules by their worst attack, the least harmed first ({_number_of_seeds(findings)})."
    return table(caption, head, groups) + guide("Reading the table", GUIDE)


def _numbers(measured: Measured) -> list[str]:
    """The cells below the headings NUMBERS."""
    found = measured.estimates()
    return [
        with_interval(found["lost"], percent),
        with_interval(found["lost_at_end"], percent),
        with_interval(found["slowdown"], times),
        percent(float(np.max(measured.lost))),
    ]


def _number_of_seeds(findings: Findings) -> str:
    number = findings.plan.report_seeds
    return f"{number} seed{'s' * (number != 1)}"


def _breaking(findings: Findings, ranked: Sequence[RuleFindings]) -> str:
    """How much is lost by the number of attackers."""
    measured = [each for each in ranked if each.breaking]
    if not measured:
        return ""
    drawn, groups, words = [], {}, []
    for found in measured:
        bound = found.without.num_byzantine
        several = [found.without, *found.breaking]
        lost = {each.num_attackers: each.estimates()["lost"] for each in several}
        drawn.append(lost_by_attackers(found.rule, lost, bound))
        groups[escape(found.rule) if len(measured) > 1 else ""] = [
            row_of(f"{each.num_attackers}{', more than f' * (each.num_attackers > bound)}", *_numbers(each))
            for each in several
        ]
        broken = [number for number, each in lost.items() if each.value >= BROKEN]
        words.append(
            f"{found.rule} (f = {bound}) loses half of the learning or more "
            + (f"from {min(broken)} attackers on." if broken else f"with none of 0 to {max(lost)} attackers.")
        )
    head = ["Attackers", *NUMBERS]
    caption = f"The worst attack found, by other numbers of attackers ({_number_of_seeds(findings)})."
    about = "Means with 95 % bootstrap intervals. The rule is told the number of attackers, at most f."
    shape = "pair" if len(drawn) in (1, 2, 4) else ""
    numbers = table(caption, head, groups)
    if len(measured) > 3:
        numbers = folded("All numbers", numbers)
    return bullets(words) + panels("Where it breaks", drawn, {}, about, "breaking", shape) + numbers


def _theory(ranked: Sequence[RuleFindings]) -> str:
    rows = []
    for found in ranked:
        if constants := found.constants:
            bound = constants["bound"]
            known = "none known" if bound is None else _constant(bound)
            attack = f"<code>{escape(constants['attack'])}</code>"
            rows.append(row_of(escape(found.rule), _constant(constants["measured"]), known, attack))
    if not rows:
        return ""
    caption = (
        "C_ra bounds how far the aggregate may be from the honest mean: the squared distance over the share of "
        "attackers times the mean squared distance between honest vectors. Measured is the worst of random clouds."
    )
    words = (
        "A large constant alone does not mean harm: it tells how far attackers move one aggregate, and not whether "
        "these moves add up over the training."
    )
    head = ["Rule", "C_ra, measured", "C_ra, proven bound", "Measured under"]
    return f"<p>{words}</p>{table(caption, head, {'': rows})}"


def _constant(value: float) -> str:
    return short_number(value) if isfinite(value) else "unbounded"


def _tried(findings: Findings, found: RuleFindings) -> str:
    shown = found.searched[:MOST_SHOWN]
    what = "Wanted action, % of steps" if findings.plan.goal == "target" else "Lost, %"
    if findings.plan.goal == "end":
        what = "Lost at the end, %"
    rows = [
        row_of(f"{number}", percent(harm), f"<code>{escape(attack)}</code>")
        for number, (attack, harm) in enumerate(shown, start=1)
    ]
    caption = (
        "Harm on the seeds of the search, by which attacks were chosen: the worst of them look worse here than on "
        "fresh seeds."
    )
    if "the best on more seeds" not in findings.cut_short:
        caption += " The finalists, which were trained on more seeds, come first."
    number = len(found.searched)
    title = f"{found.rule}: " + (f"the worst {len(shown)} of " if number > len(shown) else "") + f"{number} attacks"
    return folded(title, table(caption, ["", f"{what}, on the search's seeds", "Attack"], {"": rows}))
