"""Doors to the outside: the log, the checkpoint store, models, MLflow, time. Imports schemas only."""
