"""Grids of runs, and what they show.

`paper` has the figures of the paper as grids of runs, `authors_script` the quirks of the published code, `sweeps` a
user's own grids. `results` keeps what runs produced, `statistics` and `summaries` turn it into numbers, `figures` and
`report` into plots and a page.
"""
