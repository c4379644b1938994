"""Test that the blocking client equals the asynchronous one: same arguments, methods and types on either side."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import edge_agent
import outrider
from edge_agent import AsyncClient, BlockingSkeleton, BlockingStream, Client, CompletionStream, SkeletonStream
from outrider.core import errors

TWINS = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "aclose": "close",
}


def surface(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class and those of Python's protocols."""
    kept = {"__init__", *TWINS, *TWINS.values()}
    members = {name: member for owner in reversed(cls.__mro__[:-1]) for name, member in vars(owner).items()}
    return {
        name: member
        for name, member in members.items()
        if (name in kept or not name.startswith("_")) and (inspect.isfunction(member) or isinstance(member, property))
    }


def shape(method: Any) -> list[tuple[str, Any, Any, str]]:
    """Return the parameters with kinds, defaults and types as text; streams of either client have one name."""
    function = method.fget if isinstance(method, property) else method
    signature = inspect.signature(function)
    parameters = [(p.name, p.kind, p.default, same(p.annotation)) for p in signature.parameters.values()]
    return [*parameters, ("return", None, None, same(signature.return_annotation))]


def same(annotation: Any) -> str:
    text = str(annotation).replace("AsyncIterator", "Iterator")
    return text.replace("BlockingStream", "CompletionStream").replace("BlockingSkeleton", "SkeletonStream")


def test_the_blocking_client_lacks_no_method_and_has_no_other() -> None:
    theirs = {TWINS.get(name, name) for name in surface(AsyncClient)} | {
        "updates",
        "metrics",
    }  # there they are attributes
    assert set(surface(Client)) == theirs


@pytest.mark.parametrize("name", sorted(surface(AsyncClient)))
def test_methods_of_both_clients_take_and_give_the_same(name: str) -> None:
    assert shape(getattr(Client, TWINS.get(name, name))) == shape(getattr(AsyncClient, name))


@pytest.mark.parametrize(
    ("awaiting", "blocking", "name"),
    [
        (awaiting, blocking, name)
        for awaiting, blocking in ((CompletionStream, BlockingStream), (SkeletonStream, BlockingSkeleton))
        for name in sorted(set(surface(awaiting)) - {"__init__"})
    ],
)
def test_streams_of_both_clients_have_the_same_methods(awaiting: type, blocking: type, name: str) -> None:
    theirs = surface(blocking)
    assert set(theirs) - {"__init__"} >= {TWINS.get(name, name)}
    assert shape(theirs[TWINS.get(name, name)]) == shape(surface(awaiting)[name])


@pytest.mark.parametrize(
    ("name", "given"),
    [("stream", "BlockingStream"), ("stream_chat", "BlockingStream"), ("stream_skeleton", "BlockingSkeleton")],
)
def test_a_method_of_the_blocking_client_names_the_stream_that_it_returns(name: str, given: str) -> None:
    method = getattr(Client, name)
    assert inspect.signature(method).return_annotation == method.__annotations__["return"] == given
    assert getattr(AsyncClient, name).__annotations__["return"] != given


def test_outrider_has_the_names_of_the_sdk_and_no_other() -> None:
    assert all(getattr(outrider, name) is getattr(edge_agent, name) for name in edge_agent.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Sessions'"):
        outrider.Sessions  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_of_the_tree_is_among_the_public_names() -> None:
    def below(cls: type) -> set[str]:
        return {cls.__name__}.union(*(below(sub) for sub in cls.__subclasses__() if sub.__module__ == errors.__name__))

    assert below(errors.OutriderError) <= set(edge_agent.__all__)
