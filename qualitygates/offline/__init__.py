"""Offline gate: predictions and curves that the user's own training wrote become run records."""
