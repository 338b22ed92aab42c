"""Outputs of runs, sweeps and estimates: pages, curves, results on one screen, explanations."""
