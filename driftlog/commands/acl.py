"""driftlog acl: the access rules each service needs, and the command that makes them.

`list` shows what a role may do to the log of a run; it asks no broker. `create` gives each named user what its role
needs, at a broker with an authorizer, as a user that may alter the cluster. A second time it changes nothing. It takes
no rule away: what a user has beyond its roles is said, and is yours to remove.
"""

from __future__ import annotations

import argparse
import json
import sys

from driftlog.broker_access import kafka_settings, running_bootstrap
from driftlog.options import add_config_options, add_json_option, config_of
from infra.access_rights import Permission, Role, belongs_to, grants, permissions, principals_of
from infra.config import Config
from infra.runner import ExitCode
from schemas.errors import ConfigError
from schemas.ids import RunId

EXAMPLE = (
    "driftlog acl list --run demo --role generator\n"
    "  driftlog acl create --run demo --principal generator=User:g0 --principal generator=User:g1 \\\n"
    "      --principal trainer=User:trainer --dry-run"
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = commands.add_parser("acl", help="the access rules each service needs; make them at the broker")
    parser.add_argument("action", choices=("list", "create"))
    add_config_options(parser)
    add_json_option(parser)
    parser.add_argument(
        "--role", action="append", choices=tuple(Role), metavar="ROLE",
        help=f"list: of this role only (repeatable): {', '.join(Role)}",
    )  # fmt: skip
    parser.add_argument(
        "--principal", action="append", default=[], metavar="ROLE=User:NAME",
        help="create: who has the role (repeatable; one user may have several roles)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="create: say what would be made, make nothing")
    return parser


def run(options: argparse.Namespace) -> int:
    """List or create them."""
    if options.action == "list":
        return _list(options)
    return _create(options)


def _list(options: argparse.Namespace) -> int:
    if options.principal or options.dry_run:
        raise ConfigError("--principal and --dry-run go with `driftlog acl create`")
    config, _ = config_of(options)
    run_id = RunId(config.run.name)
    rows = [
        {"role": role, "resource": grant.resource, "name": grant.name, "operation": grant.operation}
        for role in (options.role or Role)
        for grant in grants(Role(role), run_id)
    ]
    if options.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['role']:<12} {row['operation']:<17} {row['resource']:<17} {row['name']}")
    return ExitCode.OK


def _create(options: argparse.Namespace) -> int:
    if options.role:
        raise ConfigError("--role goes with `driftlog acl list`; here name users: --principal ROLE=User:NAME")
    if not options.principal:
        raise ConfigError(f"name at least one user: --principal ROLE=User:NAME; roles are {', '.join(Role)}")
    principals = principals_of(options.principal)
    config, at = config_of(options)
    run_id = RunId(config.run.name)
    wanted = permissions(principals, run_id)
    missing, beyond = _apply(config, running_bootstrap(config, at), run_id, wanted, dry_run=options.dry_run)
    if options.json:
        print(
            json.dumps(
                {"created": [] if options.dry_run else [str(one) for one in missing],
                 "missing": [str(one) for one in missing] if options.dry_run else [],
                 "there": len(wanted) - len(missing), "beyond": beyond}
            )
        )  # fmt: skip
    else:
        for one in missing:
            print(f"{'would create' if options.dry_run else 'created'}: {one}")
    for words in beyond:
        print(f"beyond its roles: {words}", file=sys.stderr)
    verb = "to create" if options.dry_run else "created"
    print(f"{len(missing)} rules {verb}, {len(wanted) - len(missing)} were there already", file=sys.stderr)
    return ExitCode.OK


def _apply(
    config: Config, bootstrap: str, run_id: RunId, wanted: tuple[Permission, ...], *, dry_run: bool
) -> tuple[list[Permission], list[str]]:
    """(what was missing, what these users may do to the run beyond it)."""
    from infra.kafka_acls import KafkaAcls
    from infra.kafka_clients import quiet_client_loggers

    quiet_client_loggers()
    acls = KafkaAcls(kafka_settings(config, bootstrap))
    try:
        found = acls.rules_of(one.principal for one in wanted)
        missing = [one for one in wanted if one not in found.permissions]
        if not dry_run:
            acls.create(missing)
    finally:
        acls.close()
    plain = sorted(found.permissions - set(wanted))
    beyond = [str(one) for one in plain if belongs_to(one.grant.name, run_id)]
    return missing, beyond + [words for _, words in found.others]
