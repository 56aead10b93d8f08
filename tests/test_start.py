"""What short programs and commands on a topic of bytes load: what they need, and no more."""

import os

import pytest
from support.children import run_python
from support.tiers import sample

import embedlog

HEAVY = {
    *("asyncio", "concurrent.futures", "dataclasses", "decimal", "difflib", "email", "html"),
    *("inspect", "logging", "multiprocessing", "numpy", "pandas", "platform", "pyarrow"),
    *("shutil", "socket", "sortedcontainers", "ssl", "subprocess", "traceback"),
}
"""Modules that take a millisecond and more, and that nothing here needs."""
UNUSED = {
    *("audit", "compaction", "convert", "kafka", "maintenance", "mirrors"),
    *("registry", "replication", "schemas", "spark"),
}
"""Packages of which only the module `__init__` may be loaded, and these:"""
LIGHT = {"embedlog.schemas.typed_row"}

OPEN = "import embedlog, os\nlog = embedlog.open(os.environ['EMBEDLOG_ROOT'])\n"
FEW = "[b'%d' % number for number in range(9)]"
PROGRAMS = {
    "open": "log.topics()",
    "create": "log.create_topic('new')",
    "send": "log.producer().send('t', b'v', key=b'k').result()",
    "send several": f"with log.producer() as p:\n for value in {FEW}: p.send('t', value)",
    "send a batch": f"log.producer().send_batch('t', {FEW}, keys={FEW}).result()",
    "read": "assert log.topic('t')[-1].value",
    "consume": "with log.consumer('t', auto_offset_reset='earliest') as c: assert c.poll(5000)",
    "commit": (
        "with log.consumer('t', group_id='h', auto_offset_reset='earliest') as c:\n"
        " assert c.poll(5000)\n c.commit()"
    ),
}
COMMANDS = {
    "tail": "tail t",
    "consume": "consume t --from-beginning",
    "produce": "produce t",
    "groups lag": "groups lag g",
}
COMMAND = "import sys\nfrom embedlog.cli import main\nassert not main(sys.argv[1:])\n"
PRINT_MODULES = "\nimport sys\nprint('modules:', *sys.modules)"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return a log with a group that has read a topic of bytes, of one partition."""
    monkeypatch.setenv("EMBEDLOG_ROOT", str(tmp_path / "log"))
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("t")
        with log.producer() as producer:
            producer.send_batch("t", [b"%d" % number for number in range(20)])
        with log.consumer("t", group_id="g", auto_offset_reset="earliest") as consumer:
            consumer.poll(5000)
            consumer.commit()


def check(*arguments, most):
    """Run a program and check what it has loaded."""
    output = run_python("-c", *arguments, input="a line\n")
    modules = set(output.rpartition("modules: ")[2].split())
    own = {name for name in modules if name.startswith("embedlog.")}
    packages = {name: name.split(".")[1:] for name in own - LIGHT}

    assert sorted(modules & HEAVY) == []
    unused = [name for name, (package, *rest) in packages.items() if package in UNUSED and rest]
    assert unused == []
    assert len(own) <= most, sorted(own)


@pytest.mark.parametrize("name", sample([*PROGRAMS], 3))
@pytest.mark.usefixtures("root")
def test_a_program_of_bytes_loads_little(name):
    """Neither pyarrow nor numpy, which take longer to import than all of this takes."""
    check(OPEN + PROGRAMS[name] + PRINT_MODULES, most=111)


@pytest.mark.parametrize("name", sample([*COMMANDS], 2))
@pytest.mark.usefixtures("root")
def test_a_command_on_bytes_loads_little(name):
    """Nor does a command."""
    check(COMMAND + PRINT_MODULES, *COMMANDS[name].split(), most=111)


@pytest.mark.usefixtures("root")
def test_columns_load_pyarrow_when_they_are_first_used():
    """In the same program, after records."""
    program = OPEN + (
        "import sys\ntopic = log.topic('t')\nassert topic[0].value == b'0'\n"
        "assert 'pyarrow' not in sys.modules\nassert topic.to_arrow().num_rows == 20\n"
        "assert 'pyarrow' in sys.modules"
    )
    run_python("-c", program, env=os.environ)
