"""Says so when a wheel is built without the jar of Spark's JVM reader."""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

JAR = "embedlog/spark/embedlog-spark.jar"


class JarHook(BuildHookInterface):
    """Called by hatchling for each wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Warn if there is no jar; an editable install can get one later."""
        if version != "editable" and not os.path.exists(os.path.join(self.root, JAR)):
            self.app.display_warning(
                f"This wheel has no {JAR}: Spark will read and write logs in Python, more slowly. "
                "Run `make jar`, which needs a JDK 17, and build it again."
            )
