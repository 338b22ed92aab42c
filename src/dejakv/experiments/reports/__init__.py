"""What runs, sweeps and estimates are shown as: pages, curves, results on one screen, explanations."""
