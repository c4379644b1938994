"""Everything that the device needs for one target: tokenizer, chat template, draft."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge_agent.drafting.health import DraftHealth
from edge_agent.drafting.pool import DraftOptions, DraftPool
from edge_agent.releases.loader import Load
from edge_agent.target.artifact_cache import ArtifactCache, ArtifactRef, Fetch
from edge_agent.target.artifact_client import Description
from edge_agent.target.chat_template import ChatTemplate, special_tokens
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.core.errors import BadRequest, ModelRefused, OutriderError, VocabularyMismatch
from outrider.wire.ticket import Target

log = logging.getLogger(__name__)

LOOKUP = "lookup"
AUTO = "auto"

Begin = Callable[[Target, Load], Awaitable[DraftPool | None]]


class Books(Protocol):
    """Where a target's description and artifacts come from: verifiers, or what is left of them on this device."""

    async def describe(self) -> Description: ...

    @property
    def fetch(self) -> Fetch: ...


@dataclass(frozen=True)
class TargetKit:
    """Made once per client and target; `drafts` is None for plain cloud streaming."""

    description: Description
    tokenizer: TargetTokenizer
    template: ChatTemplate | None
    drafts: DraftPool | None

    async def close(self) -> None:
        if self.drafts is not None:
            await self.drafts.__aexit__(None, None, None)


async def assemble(
    library: Books,
    cache: ArtifactCache,
    draft: str | Path | None,
    options: DraftOptions,
    begin: Begin | None = None,
) -> TargetKit:
    """Describe, fetch what is missing, check it, load the draft.

    draft: "auto" the one that the verifier offers, "lookup" look-up alone, a path, or None for none. begin: gives
    the draft that comes before the verifier's own, if there is one.
    Raises VocabularyMismatch for a draft of another vocabulary, ModelRefused, BadRequest.
    """
    description = await library.describe()
    tokenizer_ref = description.artifact("tokenizer")
    if tokenizer_ref is None:
        raise BadRequest("the verifier offers no tokenizer, so that no text can be made; is it much older?")
    tokenizer_path = await cache.get(tokenizer_ref, library.fetch)
    tokenizer = await asyncio.to_thread(lambda: TargetTokenizer(tokenizer_path.read_bytes()))
    announced = description.target.tokenizer_hash
    if announced != f"sha256:{tokenizer.vocabulary_hash.hex()}":
        raise VocabularyMismatch(
            f"the target's token table has the hash {announced[:24]}, the tokenizer that its verifier offers "
            f"sha256:{tokenizer.vocabulary_hash.hex()[:16]}; the verifier's model directory is inconsistent"
        )
    template_ref = description.artifact("template")
    template = await _template(template_ref, library, cache, description, tokenizer) if template_ref else None

    def load(path: Path, name: str, digest: str, health: DraftHealth) -> Awaitable[DraftPool]:
        return DraftPool.load(path, name, tokenizer.table, options, digest, health)

    drafts = await begin(description.target, load) if begin is not None else None
    if drafts is None:
        drafts = await _drafts(description, library, cache, tokenizer, draft, options)
    kit = TargetKit(description, tokenizer, template, drafts)
    try:
        if drafts is not None:
            await drafts.warm_up()
    except BaseException:  # a cancellation, above all
        await kit.close()
        raise
    return kit


async def _template(
    ref: ArtifactRef, library: Books, cache: ArtifactCache, description: Description, tokenizer: TargetTokenizer
) -> ChatTemplate:
    path = await cache.get(ref, library.fetch)
    variables = _guessed_tokens(description, tokenizer)
    tokens_ref = description.artifact("special_tokens")
    if tokens_ref is not None:
        tokens_path = await cache.get(tokens_ref, library.fetch)
        try:
            variables |= special_tokens(tokens_path.read_bytes())
        except ModelRefused as error:
            log.warning("chat goes on without the target's special tokens: %s", error)
    return ChatTemplate(path.read_bytes(), variables=variables)


def _guessed_tokens(description: Description, tokenizer: TargetTokenizer) -> dict[str, str]:
    """What a verifier that does not offer its special tokens lets us know of them."""
    ends = [
        tokenizer.table[i].decode("utf-8", "replace") for i in description.eos_token_ids if i < len(tokenizer.table)
    ]
    return {"eos_token": ends[0] if ends else "", "bos_token": ""}


async def _drafts(
    description: Description,
    library: Books,
    cache: ArtifactCache,
    tokenizer: TargetTokenizer,
    draft: str | Path | None,
    options: DraftOptions,
) -> DraftPool | None:
    if draft is None:
        return None
    if draft == LOOKUP:
        return DraftPool.lookup_only(options)
    if draft != AUTO:
        return await DraftPool.load(Path(draft), Path(draft).name, tokenizer.table, options)
    return await offered_draft(description, library, cache, tokenizer, options)


async def offered_draft(
    description: Description, library: Books, cache: ArtifactCache, tokenizer: TargetTokenizer, options: DraftOptions
) -> DraftPool | None:
    """As `own_draft`, and None where it cannot be fetched."""
    try:
        return await own_draft(description, library, cache, tokenizer, options)
    except VocabularyMismatch:
        raise  # somebody has paired what does not belong together, and should hear of it
    except OutriderError as error:
        log.warning("the offered draft cannot be fetched, going on as plain cloud streaming: %s", error)
        return None


async def own_draft(
    description: Description, library: Books, cache: ArtifactCache, tokenizer: TargetTokenizer, options: DraftOptions
) -> DraftPool | None:
    """The verifier's own draft; look-up where it has none, None where it cannot be used.

    Raises VocabularyMismatch, or what the fetch raises: it may be had at another time.
    """
    ref = description.artifact("draft")
    if ref is None:
        log.info("the verifier offers no draft; guessing from the text itself")
        return DraftPool.lookup_only(options) if options.prompt_lookup else None
    try:
        path = await cache.get(ref, library.fetch)
        return await DraftPool.load(path, ref.name, tokenizer.table, options, ref.digest)
    except VocabularyMismatch:
        raise
    except (ModelRefused, ImportError) as error:
        log.warning("the offered draft cannot be used, going on as plain cloud streaming: %s", error)
        return None
