"""Script targets and drafts: the next token is a function of those before it, and acceptance can be set."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence

from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.draft_session import DraftSession
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency
from edge_agent.drafting.loading import Draft
from edge_agent.drafting.pool import DraftPool, started
from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from edge_agent.drafting.worker import DraftWorker
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.protocol.device import DeviceSession

VOCABULARY = 97


def target(sequence: Sequence[int]) -> int:
    """Return the next token: a hash of the last three and of the sequence's length."""
    data = bytes(token % 251 for token in (*sequence[-3:], len(sequence)))
    return hashlib.blake2b(data, digest_size=2).digest()[0] % VOCABULARY


def continuation(prompt: Sequence[int], count: int, rule: Callable[[Sequence[int]], int] = target) -> list[int]:
    """Return what the target alone generates."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(rule(sequence))
    return sequence[len(prompt) :]


class ScriptedSource:
    """Propose the right token with probability `quality`, by a hash; otherwise the right token is second or missing.

    read_s: time that it takes to read a sequence. raises_after: decodes after which it breaks; 0: it cannot even read.
    """

    def __init__(
        self, quality: float = 1.0, decode_s: float = 0.0, raises_after: int = -1, read_s: float = 0.0
    ) -> None:
        self.quality = quality
        self.decode_s = decode_s
        self.raises_after = raises_after
        self.read_s = read_s
        self.decodes = 0
        self._sequence: list[int] = []

    def begin(self, task: DraftTask) -> None:
        if self.raises_after == 0:
            raise RuntimeError("the draft broke")
        time.sleep(self.read_s)
        self._sequence = [*task.prompt, *task.received]

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._work()
        self._sequence += tokens

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        self._work()
        return [self._propose([*self._sequence, *node.path]) for node in nodes]

    def _work(self) -> None:
        self.decodes += 1
        if self.decodes == self.raises_after:
            raise RuntimeError("the draft broke")
        time.sleep(self.decode_s)

    def _propose(self, sequence: list[int]) -> list[Proposal]:
        right = target(sequence)
        luck = hashlib.blake2b(repr(sequence[-4:]).encode(), digest_size=4).digest()
        draw = int.from_bytes(luck, "little") / 2**32
        wrong = (right + 1) % VOCABULARY
        if draw < self.quality:
            return [Proposal(right, 0, 2.0), Proposal(wrong, 1, 2.0)]
        if draw < (1 + self.quality) / 2:
            return [Proposal(wrong, 0, 0.2), Proposal(right, 1, 0.2)]
        return [Proposal(wrong, 0, 0.2), Proposal((right + 2) % VOCABULARY, 1, 0.2)]


class ScriptedDraft(Draft):
    """A draft that drafts by script, in one session at a time."""

    def __init__(self, source: ScriptedSource, release: str = "", name: str = "scripted") -> None:
        super().__init__(name, release)
        self.source = source
        self.returned = 0
        """How often its worker was returned."""

    @property
    def has_model(self) -> bool:
        return True

    def drafter(self, owned: object) -> Drafter:
        cost_s = max(self.source.decode_s, 1e-5)
        latency = DecodeLatency(((1, cost_s), (4, 2 * cost_s)))
        return Drafter([CalibratedSource(self.source, Calibrator(), Calibrator(), latency)])


class ScriptedPool(DraftPool):
    """Holds drafts with one worker each, which draft by script."""

    def __init__(self, draft: ScriptedDraft) -> None:
        super().__init__(1)
        self.draft = draft
        self.ngram = None

    def begin(self, session: DeviceSession) -> DraftSession:
        """Return a session that begins with the draft in use."""
        assert self.draft is not None
        drafting = DraftSession(session, self)
        if not self.draft.idle:
            self.draft.idle.append(started(self.draft))
        drafting.use(self.draft.idle.pop())
        self.draft.users += 1
        return drafting

    def give_back(self, worker: DraftWorker) -> None:
        assert isinstance(worker.draft, ScriptedDraft)
        worker.draft.returned += 1
        super().give_back(worker)


def tokenizer_json() -> bytes:
    """Return the tokenizer of the tiny GGUF: one token per byte, a few merges, two control tokens, padding."""
    from tiny_gguf import MERGES, SPECIAL, vocabulary

    tokens, _ = vocabulary()
    added = [
        {"id": tokens.index(text), "content": text, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for text in SPECIAL
    ]  # fmt: skip
    vocab = {token: i for i, token in enumerate(tokens) if not token.startswith("[PAD")}
    model = {"type": "BPE", "vocab": vocab, "merges": [merge.split() for merge in MERGES]}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {**model, "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False},
        }
    ).encode()  # fmt: skip
