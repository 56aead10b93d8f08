"""The document of a group: members in and out, targets, and what is asked of it (M1–M16)."""

import pytest

from embedlog.errors import (
    FencedInstanceIdError,
    GroupMaxSizeReachedError,
    InconsistentGroupProtocolError,
    UnknownMemberIdError,
)
from embedlog.groups.membership import GROUPS, MemberInfo, Membership
from embedlog.record import TopicPartition

T0, T1, U0 = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)


def info(name, *, instance=None, topics=("t",), assignors=("range",), data=None):
    return MemberInfo(name, instance, "c", 7, f"locks/{name}", topics, assignors, 1000, 5, data)


def group_of(*members):
    group = Membership()
    for each in members:
        group.admit(each)
    return group


def settled(*members, target=None):
    group = group_of(*members)
    group.settle("range", {"t": (1, 2)}, target or {each.id: () for each in members}, 1)
    return group


def test_members_stand_in_the_order_they_joined():
    """The first is the leader, for as long as it stays (M3)."""
    group = group_of(info("b"), info("a"), info("c"))

    assert list(group.members) == ["b", "a", "c"]
    group.remove(["b"], 9)
    assert list(group.members) == ["a", "c"]


def test_each_target_is_a_generation():
    """Also that of nobody; and the numbers go on when somebody comes back (M2)."""
    group = settled(info("a"))
    assert group.generation == 1
    group.remove(["a"], 9)
    assert group.generation == 2

    group.admit(info("b"))
    group.settle("range", {}, {"b": ()}, 1)
    assert group.generation == 3


CHANGES = {
    "one joins": (lambda group: group.admit(info("c")), False),
    "one leaves": (lambda group: group.remove(["b"], 9), False),
    "a stranger leaves": (lambda group: group.remove(["x"], 9), True),
    "one wants another topic": (lambda group: group.resubscribe("a", ["u"]), False),
    "one wants the same": (lambda group: group.resubscribe("a", ["t"]), True),
    "a topic grew": (lambda group: group.notice({"t": (1, 3)}), False),
    "a topic was created again": (lambda group: group.notice({"t": (2, 2)}), False),
    "a topic is gone": (lambda group: group.notice({}), False),
    "the topics are the same": (lambda group: group.notice({"t": (1, 2)}), True),
    "a static one comes back": (lambda group: group.admit(info("s2", instance="s")), True),
    "it comes back with another wish": (
        lambda group: group.admit(info("s2", instance="s", topics=("u",))),
        False,
    ),
    "it comes back with other data": (
        lambda group: group.admit(info("s2", instance="s", data="x")),
        False,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_new_target_is_needed_for_other_members_topics_or_wishes(change):
    """And for nothing else: who asks for the same disturbs nobody (M4, M13, M16)."""
    step, stays = CHANGES[change]
    group = settled(info("a"), info("b"), info("s", instance="s"))
    version = group.version

    step(group)
    assert group.settled == stays
    assert (group.version == version) == (stays and "static" not in change)


def test_a_group_that_is_unsettled_stays_so_when_a_static_member_comes_back():
    """Somebody else's change is still to be answered (M13)."""
    group = settled(info("s", instance="s"))
    group.admit(info("a"))
    group.admit(info("s2", instance="s"))

    assert not group.settled


def test_a_static_member_that_comes_back_has_the_place_and_the_target_of_the_one_before():
    """Nothing moves (M13)."""
    group = settled(
        info("s", instance="s"), info("b"), target={"s": (T0,), "b": (T1,)}
    )  # fmt: skip
    before = group.admit(info("a", instance="s"))

    assert before.id == "s"
    assert list(group.members) == ["a", "b"]
    assert group.target == {"a": (T0,), "b": (T1,)}
    assert group.generation == 1


def test_one_without_an_assignor_in_common_is_refused():
    """It would leave the group without one (M5)."""
    group = group_of(info("a", assignors=("range", "sticky")), info("b"))
    with pytest.raises(InconsistentGroupProtocolError):
        group.admit(info("c", assignors=("sticky",)))

    group.remove(["b"], 9)
    group.admit(info("c", assignors=("sticky",)))


def test_the_assignors_of_a_static_member_before_do_not_count():
    """It is the one that is replaced (M5, M13)."""
    group = group_of(info("s", instance="s", assignors=("range",)))
    group.admit(info("s2", instance="s", assignors=("sticky",)))

    assert not group.settled


def test_a_group_has_no_more_members_than_it_may():
    """But who takes somebody's place takes no new one (M12)."""
    group = group_of(info("a"), info("s", instance="s"))
    with pytest.raises(GroupMaxSizeReachedError):
        group.admit(info("b"), max_members=2)

    group.admit(info("s2", instance="s"), max_members=2)
    assert list(group.members) == ["a", "s2"]


def test_the_last_one_out_leaves_the_time_and_no_target():
    """From then on its offsets may expire (M15)."""
    group = settled(info("a"), target={"a": (T0,)})
    gone = group.remove(["a", "a", "x"], 99)

    assert [each.id for each in gone] == ["a"]
    assert (group.emptied_ms, group.settled, group.target) == (99, True, {})
    assert group.assignor is None


def test_only_what_members_want_is_subscribed():
    """Of all of them together (M27)."""
    group = group_of(info("a", topics=("t", "u")), info("b", topics=("v",)))
    assert group.subscribed == {"t", "u", "v"}
    assert Membership().subscribed == set()


def test_candidates_own_what_the_last_target_gave_them():
    """A change in the middle of a move does not undo the move."""
    group = settled(info("a", data="é"), info("b"), target={"a": (T0, T1), "b": ()})
    group.admit(info("c", instance="i"))
    a, b, c = group.candidates()

    assert (a.owned, a.generation, a.user_data) == ({T0, T1}, 1, b"\xe9")
    assert (b.owned, b.generation, b.user_data) == (frozenset(), 1, None)
    assert (c.generation, c.instance_id) == (-1, "i")


def test_who_was_removed_is_told_so_and_who_was_replaced_is_told_by_whom():
    """Unknown member, or fenced instance (M11, M13)."""
    group = group_of(info("s2", instance="s"))
    group.check_member("s2", "s", "g")

    with pytest.raises(FencedInstanceIdError, match="process 7"):
        group.check_member("s", "s", "g")
    for instance in (None, "other"):
        with pytest.raises(UnknownMemberIdError) as raised:
            group.check_member("s", instance, "g")
        assert (raised.value.group, raised.value.member) == ("g", "s")


def test_a_document_comes_back_as_it_was():
    """With every kind of member, target and topic."""
    group = settled(
        info("a", topics=("t", "u"), data="é\0"),
        info("s", instance="s", assignors=("sticky", "range")),
        target={"a": (T0, T1, U0), "s": ()},
    )
    group.admit(info("c"))
    group.emptied_ms = 12

    for document in (group, Membership()):
        assert GROUPS.unpack(GROUPS.pack(document)) == document
