"""Sensitivity sweeps: which layers, which products and which format harm training, and the recipe.

Five stages: speed, screen, branches, selection, confirmation. A sweep's numbers choose what to try;
only a gate of its own, with fresh seeds on another evaluation range, accepts anything.
"""
