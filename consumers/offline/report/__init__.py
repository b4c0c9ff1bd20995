"""`report`: one self-contained HTML of a run, made from its log: reading (bounded), figures (values), page (markup)."""
