"""Robust aggregation: vectors [K, d] in, one vector out. It needs nothing else of byzpg.

Aggregation rules, attacks and `certificate` can be imported from here, and so can what rules and attacks of your own
build on: the decorators `aggregator` and `attack`, `WeightedAggregator`, `MessageAttack`, `Knowledge`, …. Agreement
rules are in `byzpg.robust.agreement`, because MDA is both. `byzpg.robust.exchange.exchange` is a whole round of
messages.

Examples:
    >>> import numpy as np
    >>> from byzpg.robust import RFA, Mean
    >>> rows = np.array([[1, 1], [2, 2], [3, 2], [2, 3], [90, -90]], np.float32)  # the last row is an attacker's
    >>> for rule in (Mean(), RFA()):
    ...     print(rule, rule(rows, num_byzantine=1).round(1))
    Mean() [ 19.6 -16.4]
    RFA() [2. 2.]
"""

from byzpg.robust import adaptive, aggregators, agreement, attacks, certificates, exchange, functions
from byzpg.robust.adaptive import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from byzpg.robust.aggregators import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from byzpg.robust.agreement import Agreement, WeightedAgreement
from byzpg.robust.attacks import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from byzpg.robust.certificates import Certificate, certificate
from byzpg.robust.functions import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from byzpg.robust.geometry import Cloud
from byzpg.robust.least_diameter import SearchLimitError
from byzpg.robust.rules import Rule
from byzpg.robust.trees import aggregate, optax_aggregator

__all__ = [
    "Agreement",
    "Certificate",
    "Cloud",
    "Rule",
    "SearchLimitError",
    "WeightedAgreement",
    "adaptive",
    "aggregate",
    "aggregators",
    "agreement",
    "attacks",
    "certificate",
    "certificates",
    "exchange",
    "functions",
    "optax_aggregator",
]
__all__ += adaptive.__all__
__all__ += aggregators.__all__
__all__ += attacks.__all__
__all__ += functions.__all__
