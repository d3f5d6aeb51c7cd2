"""Measuring: timed runs, statistics, reports, sweeps, roofline."""
