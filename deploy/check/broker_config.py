"""The broker's variables in a compose file, as the properties the image makes of them, given to Kafka's own tool.

`StorageTool format` reads the whole configuration before it writes anything, and refuses a cluster id that is none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from deploy.check.compose import Service

_PREFIX = "KAFKA_"
_NOT_PROPERTIES = frozenset({"KAFKA_HEAP_OPTS"})
FORMAT_LIMIT_S = 60.0


def property_name(variable: str) -> str:
    """As the image does it: ___ is -, __ is _, _ is a dot.

    >>> property_name("KAFKA_LOG_DIRS"), property_name("KAFKA_A__B_C___D")
    ('log.dirs', 'a_b.c-d')
    """
    name = variable.removeprefix(_PREFIX).lower()
    return re.sub("_{1,3}", lambda run: {1: ".", 2: "_", 3: "-"}[len(run.group())], name)


def properties(kafka: Service, data: Path) -> str:
    """server.properties of the container, its data elsewhere."""
    given = {
        property_name(name): value
        for name, value in kafka.environment.items()
        if name.startswith(_PREFIX) and name not in _NOT_PROPERTIES
    }
    return "".join(f"{name}={value}\n" for name, value in (given | {"log.dirs": str(data)}).items())


def refusal(kafka: Service, jars: Path, folder: Path) -> str:
    """What Kafka says against the configuration; empty: nothing."""
    java = shutil.which("java")
    if java is None:
        return "java is not on the PATH"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "server.properties"
    path.write_text(properties(kafka, folder / "data"), encoding="ascii")
    classpath = os.pathsep.join(str(jar) for jar in sorted(jars.glob("*.jar")))
    line = [java, "-XX:TieredStopAtLevel=1", "-cp", classpath, "kafka.tools.StorageTool", "format"]
    line += ["-t", kafka.environment["CLUSTER_ID"], "-c", str(path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=FORMAT_LIMIT_S, check=False)
    # The tool exits 0 for some refusals: what counts is whether it has formatted.
    if done.returncode == 0 and (folder / "data" / "meta.properties").exists():
        return ""
    return (done.stdout + done.stderr).strip()[-1500:] or f"exit {done.returncode}"
