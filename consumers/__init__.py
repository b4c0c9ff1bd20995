"""Readers of the log: trainer, coordinator, projector, offline tools. Imports schemas and infra, never producers."""
