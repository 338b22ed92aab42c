"""One self-contained HTML page from the files of runs, sweeps, frontiers, workloads, replays and tunings."""
