"""Generation services: claim, generate, prove weights, publish. Imports schemas and infra, never consumers."""
