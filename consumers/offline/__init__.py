"""Questions to the log after the fact. Reads what the services wrote, writes nothing back, decides nothing.

One folder a question (audit, replay, reanalyse, export, lineage, trace, diff, report); run_log, trained_steps and
trajectory_batches are the three ways to read: events and records, training steps, columns.
"""
