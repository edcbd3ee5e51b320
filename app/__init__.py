"""Evenkeel: cluster-scale PyTorch training on Ray whose result does not depend on the cluster."""
