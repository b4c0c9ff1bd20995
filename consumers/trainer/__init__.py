"""The trainer: pure decisions (pacing, grouping, admission, positions) and the service that acts on them."""
