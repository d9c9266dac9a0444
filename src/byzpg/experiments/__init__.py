"""Grids of runs, and what they show: the paper's figures, sweeps, statistics, figures and reports."""
