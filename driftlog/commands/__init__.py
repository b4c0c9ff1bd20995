"""The commands, one verb a file: `add(subparsers)`, `run(options) -> int`; heavy modules are imported late."""
