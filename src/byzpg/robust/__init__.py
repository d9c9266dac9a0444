"""Robust aggregation: vectors [K, d] in, one vector out. It needs nothing else of byzpg.

Aggregation rules, attacks and `certificate` can be imported from here, and so can what rules and attacks of your own
build on: `WeightedAggregator`, `MessageAttack`, `Knowledge`, `Cloud`, …. Agreement rules are in
`byzpg.robust.agreement`, because MDA is both. `byzpg.robust.exchange.exchange` is a whole round of messages.

Examples:
    >>> import numpy as np
    >>> from byzpg.robust import RFA, Mean
    >>> rows = np.array([[1, 1], [2, 2], [3, 2], [2, 3], [90, -90]], np.float32)  # the last row is an attacker's
    >>> for rule in (Mean(), RFA()):
    ...     print(rule, rule(rows, num_byzantine=1).round(1))
    Mean() [ 19.6 -16.4]
    RFA() [2. 2.]
"""

from byzpg.robust import aggregators, agreement, attacks, certificates, exchange
from byzpg.robust.aggregators import (
    ARC,
    CAF,
    MDA,
    NNM,
    RFA,
    Aggregator,
    Bucketing,
    Bulyan,
    CenteredClipping,
    Clipping,
    Krum,
    MeaMed,
    Mean,
    Median,
    MoNNA,
    MultiKrum,
    PreAggregator,
    TrimmedMean,
    WeightedAggregator,
)
from byzpg.robust.agreement import Agreement, WeightedAgreement
from byzpg.robust.attacks import (
    ALIE,
    IPM,
    Attack,
    AvgZero,
    Dissensus,
    Equivocate,
    FixedSet,
    Knowledge,
    LargeNoise,
    MDAFooling,
    MessageAttack,
    Mimic,
    MinMax,
    MinSum,
    NoAttack,
    NonFinite,
    OptimalALIE,
    OptimalIPM,
    RandomAction,
    RandomReward,
    RewardFlip,
    RotatingSet,
    SignFlip,
    Silent,
    Zero,
)
from byzpg.robust.certificates import Certificate, certificate
from byzpg.robust.geometry import Cloud
from byzpg.robust.least_diameter import SearchLimitError
from byzpg.robust.rules import Rule

__all__ = [
    "ALIE",
    "ARC",
    "CAF",
    "IPM",
    "MDA",
    "NNM",
    "RFA",
    "Aggregator",
    "Agreement",
    "Attack",
    "AvgZero",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "Certificate",
    "Clipping",
    "Cloud",
    "Dissensus",
    "Equivocate",
    "FixedSet",
    "Knowledge",
    "Krum",
    "LargeNoise",
    "MDAFooling",
    "MeaMed",
    "Mean",
    "Median",
    "MessageAttack",
    "Mimic",
    "MinMax",
    "MinSum",
    "MoNNA",
    "MultiKrum",
    "NoAttack",
    "NonFinite",
    "OptimalALIE",
    "OptimalIPM",
    "PreAggregator",
    "RandomAction",
    "RandomReward",
    "RewardFlip",
    "RotatingSet",
    "Rule",
    "SearchLimitError",
    "SignFlip",
    "Silent",
    "TrimmedMean",
    "WeightedAggregator",
    "WeightedAgreement",
    "Zero",
    "aggregators",
    "agreement",
    "attacks",
    "certificate",
    "certificates",
    "exchange",
]
