"""Python imports this when a planner of a test session starts: `support.planner_faults` acts in it.

`support.spark_session.quick_python` puts this directory on the path of planners only.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from support import planner_faults

planner_faults.install()
