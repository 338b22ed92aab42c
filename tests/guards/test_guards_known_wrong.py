from dejakv.guards.known_wrong import KnownWrongGuard
from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta
from dejakv.testing.levels import Case, GuardTests

ASKED = Request("r", "prompt", "chunk")


def case(donor: str) -> Case:
    return ASKED, ChunkMeta(donor, "default", "e", (1,), "p", "c"), Match(donor, "semantic_text", 0.9)


class TestKnownWrongGuard(GuardTests):
    def make(self) -> KnownWrongGuard:
        guard = KnownWrongGuard()
        guard.observe(*case("wrong"), False)
        return guard

    def accepted(self) -> Case:
        return case("right")

    def rejected(self) -> Case:
        return case("wrong")


def test_a_donor_that_agreed_stays_and_the_memory_is_bounded() -> None:
    guard = KnownWrongGuard(remembered=2)
    guard.observe(*case("a"), True)
    assert guard.judge(*case("a")).decision == "abstain"
    for donor in ("a", "b", "c"):
        guard.observe(*case(donor), False)
    assert [guard.judge(*case(donor)).decision for donor in ("a", "b", "c")] == ["abstain", "reject", "reject"]
