"""Sweeps: many settings tried with the same run, by Ray Tune."""
