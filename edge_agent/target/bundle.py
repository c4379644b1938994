"""Load what a device needs for one target: its description, tokenizer, chat template and draft."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.config import EdgeSettings
from edge_agent.drafting.loading import NGRAM, Draft, DraftOptions, load, ngram_draft
from edge_agent.releases.follower import LoadDraft
from edge_agent.target.artifacts import Fetch, artifact_of, cached, digest
from edge_agent.target.chat_template import ChatTemplate, Message, special_tokens
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.artifacts.store import ArtifactStore
from outrider.core.constraint import Grammars, GrammarState
from outrider.core.errors import BadRequest, ModelRefused, OutriderError, VocabularyMismatch
from outrider.llama.library import library
from outrider.wire.v1 import session_pb2 as pb

log = logging.getLogger(__name__)

TEMPLATE_CHECK_S = 5.0
"""Seconds that the chat template may take for a plain message before it is called broken."""
AUTO, NO_DRAFT = "auto", "none"
UNSIGNED = (
    "the verifier's own draft is not loaded, since no publisher has signed it and release keys are set; publish it as"
    " a release, or name a file of yours as the draft"
)
"""Why a device with OUTRIDER_EDGE_RELEASE_KEYS begins without a model."""

GivenDraft = str | Path | Sequence[str | Path] | None
"""A draft as an application names it: "auto", "ngram", a path, several paths with the best one first, or None."""
FirstDraft = Callable[[pb.TargetIdentity, LoadDraft], Awaitable[Draft | None]]
"""Loads a draft that takes precedence over the one that the verifiers offer; returns None where there is none."""


@dataclass(frozen=True)
class TargetBundle:
    """Everything that a client loads once for its target. `draft` is None without speculation."""

    description: pb.DescribeResponse
    tokenizer: TargetTokenizer
    template: ChatTemplate | None
    draft: Draft | None

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt. Raises BadRequest. Call it on a thread: a long text takes seconds."""
        return self.tokenizer.encode_prompt(text)

    def encode_chat(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> list[int]:
        """Return the ids of messages in the target's template. Call it on a thread: a template is foreign code.

        variables: further ones of the template, such as `tools`.

        Raises ModelRefused for a target without a template, BadRequest.
        """
        if self.template is None:
            raise ModelRefused(f"the target {self.description.target.name} has no chat template; use generate")
        known = self.tokenizer
        return self.template.tokenise(messages, known.encode, known.encode_plain, known.controls, variables)

    def grammar(self, grammar: str) -> Callable[[], GrammarState] | None:
        """Return a function that returns the grammar's state before the first token; None for no grammar."""
        return functools.partial(self._grammars.begin, grammar) if grammar else None

    def check_grammar(self, grammar: str) -> None:
        """Compile a grammar. Raises BadRequest for one that is wrong. Call it on a thread: it may take a second."""
        try:
            self._grammars.compile(grammar)
        except ModelRefused as error:
            raise BadRequest(f"this target takes no grammars: {error}", field="grammar") from error

    @property
    def _grammars(self) -> Grammars:
        description = self.description
        return self.tokenizer.grammars(description.vocabulary_size, tuple(description.eos_token_ids))


@dataclass(frozen=True)
class BundleLoader:
    """Reads the bundle of a target with this description. fetch: gets what is not in the cache."""

    description: pb.DescribeResponse
    fetch: Fetch
    cache: ArtifactStore
    settings: EdgeSettings

    async def load(self, draft: GivenDraft, first_draft: FirstDraft | None = None) -> TargetBundle:
        """Fetch what is missing, check it and load it.

        draft: "auto" takes the verifiers' own unless only signed ones count, "ngram" proposes tokens from the text
        alone, a path names a GGUF file, several paths name drafts that propose tokens together, the best one first;
        None loads no draft. A draft that `first_draft` returns takes precedence.
        Raises VocabularyMismatch for a draft of another vocabulary, ModelRefused, BadRequest.
        """
        tokenizer = await self._tokenizer()
        template = await self._template(tokenizer)
        settings, positions = self.settings, self.description.max_sequence
        options = DraftOptions(settings.draft_workers, settings.draft_cpus, positions, tokenizer.added)
        load_files = functools.partial(load, target_table=tokenizer.table, options=options)
        first = await first_draft(self.description.target, load_files) if first_draft is not None else None
        if first is None:
            first = await self._draft(draft, load_files)
        return TargetBundle(self.description, tokenizer, template, first)

    async def _offered_draft(self, load_files: LoadDraft) -> Draft:
        """Load the verifiers' own draft; n-grams where there is none or it may not be used.

        Raises VocabularyMismatch, or the error of the fetch, which may succeed at another time.
        """
        ref = artifact_of(self.description, "draft")
        if ref is None:
            log.info("the verifier offers no draft model; n-grams of the text draft")
            return ngram_draft()
        if self.settings.release_keys:
            return _failed(UNSIGNED)
        try:
            await asyncio.to_thread(library)  # before anything is fetched in vain
        except ImportError as error:
            return _failed(str(error))
        try:
            return await load_files(await self._fetched(ref), ref.name, digest(ref))
        except ModelRefused as error:
            return _failed(f"the offered draft cannot be used: {error}")

    async def _fetched(self, ref: pb.Artifact) -> Path:
        return await cached(self.cache, ref, self.fetch)

    async def _tokenizer(self) -> TargetTokenizer:
        """Load the tokenizer. Raises BadRequest if none is offered, VocabularyMismatch if it is not the target's."""
        ref = artifact_of(self.description, "tokenizer")
        if ref is None:
            raise BadRequest("the verifier offers no tokenizer, so that no text can be made; is it much older?")
        path = await self._fetched(ref)
        tokenizer = await asyncio.to_thread(lambda: TargetTokenizer(path.read_bytes(), self.description.max_sequence))
        announced = self.description.target.tokenizer_hash
        if announced != f"sha256:{tokenizer.vocabulary_hash.hex()}":
            raise VocabularyMismatch(
                f"the target's token table has the hash {announced[:24]}, the tokenizer that its verifier offers "
                f"sha256:{tokenizer.vocabulary_hash.hex()[:16]}; the verifier's model directory is inconsistent"
            )
        return tokenizer

    async def _template(self, tokenizer: TargetTokenizer) -> ChatTemplate | None:
        ref = artifact_of(self.description, "template")
        if ref is None:
            return None
        path = await self._fetched(ref)
        # What is assumed holds where the verifier offers no special tokens.
        table = tokenizer.table
        ends = [table[i].decode("utf-8", "replace") for i in self.description.eos_token_ids if i < len(table)]
        variables = {"eos_token": ends[0] if ends else "", "bos_token": ""}
        tokens_ref = artifact_of(self.description, "special_tokens")
        if tokens_ref is not None:
            tokens_path = await self._fetched(tokens_ref)
            try:
                variables |= special_tokens(tokens_path.read_bytes())
            except ModelRefused as error:
                log.warning("chat goes on without the target's special tokens: %s", error)
        template = ChatTemplate(path.read_bytes(), variables=variables)
        try:
            async with asyncio.timeout(TEMPLATE_CHECK_S):
                await asyncio.to_thread(template.check)
        except (ModelRefused, BadRequest, TimeoutError) as error:
            why = str(error) or f"it takes longer than {TEMPLATE_CHECK_S:g} s"
            files = "chat_template.jinja, or tokenizer_config.json, of its folder"
            log.warning("chats with %s may fail, completions work: %s (%s)", self.description.target.name, why, files)
        except ImportError as error:
            log.info("%s", error)
        return template

    async def _draft(self, draft: GivenDraft, load_files: LoadDraft) -> Draft | None:
        if draft is None:
            return None
        if draft == NGRAM:
            return ngram_draft()
        if not isinstance(draft, str | os.PathLike):
            return await load_files([Path(one) for one in draft], "", "")
        if draft != AUTO:
            return await load_files(Path(draft), Path(draft).name, "")
        try:
            return await self._offered_draft(load_files)
        except VocabularyMismatch:
            raise  # draft and target were paired by mistake, which must not stay unnoticed
        except OutriderError as error:
            return _failed(f"the offered draft cannot be fetched: {error}")


def _failed(why: str) -> Draft:
    """Return n-grams in the place of an offered draft, with the reason, which is a failure."""
    log.warning("%s; n-grams of the text draft", why)
    return ngram_draft(why)
