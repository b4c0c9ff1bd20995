"""driftlog topics: create the topics of a run (existing ones are checked, never changed), and list them."""

from __future__ import annotations

import argparse
import json

from driftlog.broker_access import kafka_settings, running_bootstrap
from driftlog.options import add_config_options, add_json_option, config_of
from infra.runner import ExitCode
from schemas.ids import RunId
from schemas.topics import TOPICS, topic

EXAMPLE = "driftlog topics --config configs/countdown.toml --run demo"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("topics", help="create the topics of a run")
    add_config_options(parser)
    add_json_option(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Create what is missing."""
    from infra.kafka_admin import KafkaLogAdmin

    config, at = config_of(options)
    admin = KafkaLogAdmin(kafka_settings(config, running_bootstrap(config, at)))
    try:
        admin.create_topics(config.run.name)
    finally:
        admin.close()
    run_name = RunId(config.run.name)
    rows = [
        {
            "topic": topic(run_name, spec.name),
            "partitions": spec.partitions,
            "cleanup": spec.cleanup,
            "key": spec.key,
            "written_by": spec.written_by,
        }
        for spec in TOPICS.values()
    ]
    if options.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['topic']:<32} {row['partitions']:>3} partitions  {row['cleanup']:<8} by {row['written_by']}")
    return ExitCode.OK
