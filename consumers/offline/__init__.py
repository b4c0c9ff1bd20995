"""Questions to the log after the fact: audit, lineage, trace."""
