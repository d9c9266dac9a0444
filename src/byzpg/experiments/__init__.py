"""Experiments: the paper's figures as grids of runs, sweeps, statistics, figures and reports."""
