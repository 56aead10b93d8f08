"""Errors say what happened, where and what to do, and arrive whole from a Spark worker."""

import copy
import inspect
import pickle

import pytest

from embedlog import errors

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.EmbedlogError)
]
PLACE = {"topic": "flights", "partition": 3, "offset": 42, "path": "a/b.arrows", "position": 96}
FACTS = PLACE | {"errno": 5, "operation": "write", "pid": 7, "reason": "torn", "other": (1, 2)}


def none_breaks(check):
    """Fail with all kinds of errors about which a check has something to say."""
    found = [f"{kind.__name__}: {wrong}" for kind in KINDS if (wrong := check(kind))]
    assert not found, "\n" + "\n".join(found)


def unlike(found, expected):
    """Return what was found where it is not what was expected."""
    return None if found == expected else f"{found!r}, not {expected!r}"


@pytest.mark.parametrize("remake", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_an_error_survives_pickling_with_all_its_facts(remake):
    """A Spark worker sends its errors home."""

    def everything(error):
        shown = type(error), str(error), error.args, error.what, error.todo, error.facts
        return *shown, {name: getattr(error, name) for name in FACTS}

    def check(kind):
        error = kind("it broke", todo="Mend it.", **FACTS)
        again = everything(remake(error))
        expected = (kind, str(error), error.args, "it broke", "Mend it.", FACTS, FACTS)
        return unlike(again, expected)

    none_breaks(check)


def test_an_error_shows_what_where_and_what_to_do():
    """Nobody should need a debugger to find the place."""
    expected = "it broke [flights-3, offset 42, a/b.arrows, byte 96]. Mend it."

    none_breaks(lambda kind: unlike(str(kind("it broke", todo="Mend it.", **PLACE)), expected))


def test_unknown_facts_are_left_out():
    """None is no place; zero is one."""

    def check(kind):
        found = (
            str(kind("it broke")),
            str(kind("it broke", topic="flights")),
            str(kind("it broke", topic="t", partition=0, offset=0)),
            kind("it broke").offset,
        )
        return unlike(found, ("it broke", "it broke [flights]", "it broke [t-0, offset 0]", None))

    none_breaks(check)


def test_an_error_says_whether_to_try_again_and_what_it_means():
    """Every error has `.retriable`; every one is explained."""

    def check(kind):
        inherited = (
            kind.__doc__ == errors.EmbedlogError.__doc__ and kind is not errors.EmbedlogError
        )
        if not kind.__doc__ or inherited:
            return "has no docstring of its own"
        return None if isinstance(kind.retriable, bool) else f"retriable is {kind.retriable!r}"

    none_breaks(check)


def test_an_error_is_named_as_one():
    """The names are kafka-python's, which end so."""
    none_breaks(lambda kind: None if kind.__name__.endswith("Error") else "ends otherwise")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidConfigError, ValueError),
        (errors.SerializationError, TypeError),
        (errors.UnknownTopicOrPartitionError, LookupError),
        (errors.TimeoutError, TimeoutError),
        (errors.LockTimeoutError, TimeoutError),
    ],
)
def test_who_does_not_know_embedlog_can_catch_the_builtin(kind, builtin):
    """A mistake that Python has a name for is caught by that name too."""
    with pytest.raises(builtin):
        raise kind("it broke")
