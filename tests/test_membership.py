"""The membership document of a group: its members, target assignments and queries (M1–M16)."""

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
    for member in members:
        group.admit(member)
    return group


def group_with_target(*members, target=None):
    group = group_of(*members)
    group.set_target("range", {"t": (1, 2)}, target or {member.id: () for member in members}, 1)
    return group


def test_members_stand_in_the_order_they_joined():
    """The first member is the leader until it leaves (M3)."""
    group = group_of(info("b"), info("a"), info("c"))

    assert list(group.members) == ["b", "a", "c"]
    group.remove(["b"], 9)
    assert list(group.members) == ["a", "c"]


def test_each_target_is_a_generation():
    """An empty target counts, too, and generations never start over (M2)."""
    group = group_with_target(info("a"))
    assert group.generation == 1
    group.remove(["a"], 9)
    assert group.generation == 2

    group.admit(info("b"))
    group.set_target("range", {}, {"b": ()}, 1)
    assert group.generation == 3


CHANGES = {
    "a member joins": (lambda group: group.admit(info("c")), False),
    "a member leaves": (lambda group: group.remove(["b"], 9), False),
    "an unknown member leaves": (lambda group: group.remove(["x"], 9), True),
    "a member subscribes to another topic": (lambda group: group.resubscribe("a", ["u"]), False),
    "a member subscribes to the same topics": (lambda group: group.resubscribe("a", ["t"]), True),
    "a topic grew": (lambda group: group.notice({"t": (1, 3)}), False),
    "a topic was created again": (lambda group: group.notice({"t": (2, 2)}), False),
    "a topic is gone": (lambda group: group.notice({}), False),
    "the topics are the same": (lambda group: group.notice({"t": (1, 2)}), True),
    "a static member returns": (lambda group: group.admit(info("s2", instance="s")), True),
    "a static member returns with other topics": (
        lambda group: group.admit(info("s2", instance="s", topics=("u",))),
        False,
    ),
    "a static member returns with other user data": (
        lambda group: group.admit(info("s2", instance="s", data="x")),
        False,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_new_target_is_needed_for_other_members_topics_or_subscriptions(change):
    """A call that changes none of these does not cause a rebalance (M4, M13, M16)."""
    step, stays = CHANGES[change]
    group = group_with_target(info("a"), info("b"), info("s", instance="s"))
    version = group.version

    step(group)
    assert group.target_is_current == stays
    assert (group.version == version) == (stays and change != "a static member returns")


def test_a_group_that_needs_a_target_still_does_when_a_static_member_returns():
    """Another member's change still needs a new target (M13)."""
    group = group_with_target(info("s", instance="s"))
    group.admit(info("a"))
    group.admit(info("s2", instance="s"))

    assert not group.target_is_current


def test_a_static_member_that_returns_has_its_former_position_and_target():
    """No partition moves (M13)."""
    group = group_with_target(
        info("s", instance="s"), info("b"), target={"s": (T0,), "b": (T1,)}
    )  # fmt: skip
    before = group.admit(info("a", instance="s"))

    assert before.id == "s"
    assert list(group.members) == ["a", "b"]
    assert group.target == {"a": (T0,), "b": (T1,)}
    assert group.generation == 1


def test_a_member_without_a_common_assignor_is_refused():
    """The group would have no common assignor any more (M5)."""
    group = group_of(info("a", assignors=("range", "sticky")), info("b"))
    with pytest.raises(InconsistentGroupProtocolError):
        group.admit(info("c", assignors=("sticky",)))

    group.remove(["b"], 9)
    group.admit(info("c", assignors=("sticky",)))


def test_the_former_assignors_of_a_static_member_do_not_count():
    """The returning member replaces them (M5, M13)."""
    group = group_of(info("s", instance="s", assignors=("range",)))
    group.admit(info("s2", instance="s", assignors=("sticky",)))

    assert not group.target_is_current


def test_a_group_has_no_more_members_than_it_may():
    """A static member that returns replaces itself and is admitted (M12)."""
    group = group_of(info("a"), info("s", instance="s"))
    with pytest.raises(GroupMaxSizeReachedError):
        group.admit(info("b"), max_members=2)

    group.admit(info("s2", instance="s"), max_members=2)
    assert list(group.members) == ["a", "s2"]


def test_when_the_last_member_leaves_the_time_is_set_and_the_target_cleared():
    """From that time the offsets of the group may expire (M15)."""
    group = group_with_target(info("a"), target={"a": (T0,)})
    removed = group.remove(["a", "a", "x"], 99)

    assert [member.id for member in removed] == ["a"]
    assert (group.emptied_ms, group.target_is_current, group.target) == (99, True, {})
    assert group.assignor is None


def test_a_group_is_subscribed_to_the_topics_of_its_members():
    """The subscription is the union of theirs (M27)."""
    group = group_of(info("a", topics=("t", "u")), info("b", topics=("v",)))
    assert group.subscribed == {"t", "u", "v"}
    assert Membership().subscribed == set()


def test_candidates_own_what_the_last_target_gave_them():
    """A change during a rebalance does not undo the rebalance."""
    group = group_with_target(info("a", data="é"), info("b"), target={"a": (T0, T1), "b": ()})
    group.admit(info("c", instance="i"))
    a, b, c = group.candidates()

    assert (a.owned, a.generation, a.user_data) == ({T0, T1}, 1, b"\xe9")
    assert (b.owned, b.generation, b.user_data) == (frozenset(), 1, None)
    assert (c.generation, c.instance_id) == (-1, "i")


def test_removed_and_replaced_members_get_different_errors():
    """A removed member is unknown; a replaced one is fenced by the other process (M11, M13)."""
    group = group_of(info("s2", instance="s"))
    group.check_member("s2", "s", "g")

    with pytest.raises(FencedInstanceIdError, match="process 7"):
        group.check_member("s", "s", "g")
    for instance in (None, "other"):
        with pytest.raises(UnknownMemberIdError) as raised:
            group.check_member("s", instance, "g")
        assert (raised.value.group, raised.value.member) == ("g", "s")


def test_a_document_comes_back_as_it_was():
    """The group has members with and without every optional field."""
    group = group_with_target(
        info("a", topics=("t", "u"), data="é\0"),
        info("s", instance="s", assignors=("sticky", "range")),
        target={"a": (T0, T1, U0), "s": ()},
    )
    group.admit(info("c"))
    group.emptied_ms = 12

    for document in (group, Membership()):
        assert GROUPS.unpack(GROUPS.pack(document)) == document
