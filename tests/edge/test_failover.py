"""Test where a session goes next, and that no token is lost or doubled on the way."""

from __future__ import annotations

import pytest

from edge_agent.session.channels import VerifierSilent
from edge_agent.session.failover import Route, next_attach
from outrider.core import errors
from outrider.core.backoff import Backoff
from outrider.core.errors import OutriderError, Unavailable
from outrider.wire.v1 import coordinator_pb2 as pb


def grant(name: str, address: str, first: int, last: int) -> pb.Grant:
    return pb.Grant(verifier_id=name, address=address, ticket=b"ticket", epoch_first=first, epoch_last=last)


def placed(*grants: pb.Grant) -> pb.OpenSessionResponse:
    return pb.OpenSessionResponse(**dict(zip(("primary", "standby"), grants, strict=False)))


class Coordinator:
    """Answer resume with the given results, one after another; an error is raised."""

    def __init__(self, *answers: pb.OpenSessionResponse | OutriderError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[tuple[str, ...], int]] = []

    async def resume(self, request: pb.ResumeSessionRequest) -> pb.OpenSessionResponse:
        self.asked.append((tuple(request.failed_verifiers), request.last_epoch))
        answer = self.answers.pop(0)
        if isinstance(answer, OutriderError):
            raise answer
        return answer


def quick(budget_s: float = 5.0) -> Backoff:
    return Backoff(budget_s, draw=lambda: 0.0)


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (Unavailable("reset"), "here"),
        (errors.Draining("about to end"), "elsewhere"),
        (errors.Fenced("old"), "here"),
        (VerifierSilent("hung"), "elsewhere"),
        (errors.Overloaded("full"), "elsewhere"),
        (errors.InternalError("bug"), "elsewhere"),
        (errors.Unauthenticated("expired"), "elsewhere"),
        (errors.ProtocolViolation("gap"), "nowhere"),
        (errors.VocabularyMismatch("other"), "nowhere"),
        (errors.PermissionDenied("another verifier's ticket"), "elsewhere"),
        (errors.ModelRefused("no"), "nowhere"),
    ],
)
def test_an_error_says_where_another_attach_may_help(error: OutriderError, where: str) -> None:
    assert next_attach(error) == where


async def test_a_broken_stream_is_tried_once_more_and_then_the_standby() -> None:
    route = Route(placed(grant("a", "h:1", 10, 19), grant("b", "h:2", 20, 29)), Coordinator().resume, quick())
    attaches = [await route.next()]
    for _ in range(2):
        route.failed(Unavailable("reset"), progressed=False)
        attaches.append(await route.next())
    assert [(grant.address, epoch) for grant, epoch in attaches] == [("h:1", 10), ("h:1", 11), ("h:2", 20)]


async def test_with_no_grant_left_the_coordinator_is_asked_until_it_answers() -> None:
    coordinator = Coordinator(Unavailable("restarting"), placed(), placed(grant("c", "h:3", 40, 49)))
    route = Route(placed(grant("a", "h:1", 10, 19)), coordinator.resume, quick())
    await route.next()
    route.failed(VerifierSilent("hung"), progressed=False)
    granted, epoch = await route.next()
    assert (granted.address, epoch) == ("h:3", 40)
    assert coordinator.asked[0] == (("a",), 10)


async def test_epochs_only_grow_and_stay_within_their_grant() -> None:
    coordinator = Coordinator(placed(grant("a", "h:1", 12, 13)))
    route = Route(placed(grant("a", "h:1", 10, 11)), coordinator.resume, quick())
    epochs = []
    for _ in range(4):
        _, epoch = await route.next()
        epochs.append(epoch)
        route.failed(Unavailable("reset"), progressed=True)
    assert epochs == [10, 11, 12, 13]
