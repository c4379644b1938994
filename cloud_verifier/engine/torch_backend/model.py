"""Run a Hugging Face causal LM with attention over the KV pool; only `architecture` knows transformers as closely.

transformers calls the attention function that is registered here with every layer's query, key and value; the step's
plan waits for it in a context variable, since some models do not hand keywords of their forward on to their layers.
Nothing else of the model is changed but its layers on a CPU and its linear layers and norms (kernels), and positions
that depend on the whole batch.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cloud_verifier.engine.torch_backend import architecture
from cloud_verifier.engine.torch_backend.architecture import refused
from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.kernels.attention import (
    AttentionBackend,
    AttentionPlan,
    Scoring,
    SdpaBackend,
    running,
)
from cloud_verifier.engine.torch_backend.kernels.cuda_graphs import CudaGraphRecorder, GraphedForward
from cloud_verifier.engine.torch_backend.kernels.fusion import fuse
from cloud_verifier.engine.torch_backend.kernels.layers import fuse_layers
from cloud_verifier.engine.torch_backend.kernels.linear import LEAST_ROWS, pack_linears
from cloud_verifier.engine.torch_backend.kernels.step_tables import WIDTHS
from cloud_verifier.engine.torch_backend.kernels.triton_attention import TritonBackend, choose
from cloud_verifier.engine.torch_backend.kv_pool import KVPool, LayerShape
from cloud_verifier.engine.weights import Progress, end_token_ids, hash_of, vocabulary_of
from outrider.artifacts.model_files import weight_files
from outrider.core.errors import ModelRefused

ATTENTION = "outrider_slots"
"""The name under which transformers knows our attention; it has no mask interface, so no mask is ever built."""


class TargetModel:
    """Runs packed forward passes of the target. `check_numerics` must pass before an Engine takes it.

    weights_hash: hex digest of all that decides on the tokens: the weights and the configuration of their use.
    directory: where the tokenizer and the chat template are that say, too, what ends an answer.
    layers: shape of the keys and values of each attention layer, in order of layer_idx.
    deviation: greatest difference of logits between trees and plain sequences in the numerics check; None before it.
    states: after a forward pass, the hidden states `[R, H]` that its logits were made of, if `keep_states` was called.
    """

    def __init__(
        self,
        module: Any,
        *,
        name: str,
        weights_hash: str = "",
        backend: AttentionBackend | None = None,
        directory: Path | None = None,
    ) -> None:
        self.module = module.eval()
        self.name = name
        self.weights_hash = weights_hash
        self.attention: AttentionBackend = backend or SdpaBackend()
        self.config: Any = module.config.get_text_config()
        self.label = f"{name} (model type {self.config.model_type})"
        parameter = next(module.parameters())
        self.torch_dtype: torch.dtype = parameter.dtype
        self.device: torch.device = parameter.device
        self.deviation: float | None = None
        settings = (getattr(module, "generation_config", None), module.config, self.config)
        configured = [getattr(one, "eos_token_id", None) for one in settings]
        logits = int(self.config.vocab_size)
        self.eos_token_ids = end_token_ids(directory, configured, logits)
        self.vocab_size = vocabulary_of(directory, logits, self.eos_token_ids)
        """V, the number of ids that may be chosen, and of logits in a row; the model may have more."""
        architecture.check_layers(module, self.label)
        _install(module, self.label)
        architecture.fix_rope(module)
        self._fused = fuse(module, triton=self.attention.name == "triton")
        self._packed = pack_linears(module)
        fuse_layers(module)
        self.states: torch.Tensor | None = None
        self._seen_states: torch.Tensor | None = None
        """What the output layer read last, if `keep_states` was called."""
        self._most_rows = WIDTHS[-1]
        """Of a step."""
        self.graphs: GraphedForward | None = None
        self.layers: tuple[LayerShape, ...] = self._probe()
        self.graphs = self._new_graphs()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        attention: str = "auto",
        threads: int | None = None,
        name: str = "",
        on_progress: Progress = lambda text: None,
    ) -> Self:
        """Read a model directory. Raises ModelRefused, with the reason, for a model that cannot be served.

        dtype: float32, bfloat16 or float16; auto is bfloat16 on CUDA and float32 elsewhere.
        attention: sdpa, or triton for CUDA; auto is triton on CUDA and sdpa elsewhere.
        threads: CPU threads of the whole process; None leaves them unchanged.
        """
        directory = Path(path)
        files = weight_files(directory)
        if not (directory / "config.json").is_file() or not files:
            raise ModelRefused(f"{directory} has no config.json or no *.safetensors; give a Hugging Face directory")
        if dtype == "auto":
            dtype = "bfloat16" if torch.device(device).type == "cuda" else "float32"
        backend = TritonBackend() if choose(attention, torch.device(device)) == "triton" else SdpaBackend()
        if threads is not None:
            torch.set_num_threads(threads)
        on_progress(f"hashing weights: {sum(f.stat().st_size for f in files if f.is_file()) / 1e6:.0f} MB")
        digest = hash_of(directory, on_progress)
        on_progress(f"loading {directory.name} as {dtype} on {device}")
        module = _read_module(directory, getattr(torch, dtype)).to(device)
        return cls(
            module, name=name or directory.resolve().name, weights_hash=digest, backend=backend, directory=directory
        )

    @property
    def max_sequence(self) -> int:
        """Return the most positions that the model supports, prompt and output together."""
        return architecture.longest_sequence(self.config)

    @property
    def dtype(self) -> str:
        return str(self.torch_dtype).removeprefix("torch.")

    @property
    def backend(self) -> str:
        """Return the kernels in use: attention's, and those of replaced layers."""
        replaced = ("+onednn" if self._packed else "") + ("+fused" if self._fused else "")
        return self.attention.name + replaced

    @property
    def hardware(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return _cpu_name()

    @property
    def overlaps(self) -> bool:
        """Return whether a forward pass goes on after its call has returned: as a CUDA graph it does, and without one
        the host may wait in its midst."""
        return self.graphs is not None and not self.graphs.off

    def timer(self) -> Timer:
        """Return a timer of the forward pass that is called next."""
        return Timer(self.device)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, plan: AttentionPlan) -> torch.Tensor:
        """Return logits `[R, V]` of the rows that the batch asks for; write keys and values of all rows to the pool."""
        outputs = self.graphs(batch, plan) if self.graphs else None
        if outputs is None:
            least = LEAST_ROWS if self._packed else 1
            ids, positions = _padded(batch.input_ids, least), _padded(batch.position_ids, least)
            outputs = self._outputs(ids, positions, batch.logit_rows, plan)
        logits, *states = outputs
        self.states = states[0] if states else None
        return logits[:, : self.vocab_size]

    def keep_states(self) -> None:
        """Keep the hidden states of each forward pass's logits in `states`.

        They are what the output layer reads: the last layer's output after the last norm.
        """

        def see(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            self._seen_states = inputs[0].detach().flatten(0, 1)

        self.module.get_output_embeddings().register_forward_pre_hook(see)
        self.graphs = self._new_graphs()  # graphs from before give no states

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the input embeddings `[..., H]` of ids, for heads."""
        embeddings: torch.Tensor = self.module.get_input_embeddings()(ids)
        return embeddings

    def output(self, states: torch.Tensor) -> torch.Tensor:
        """Return the output layer's logits `[n, V]` of states `[n, H]` that heads predict."""
        logits: torch.Tensor = self.module.get_output_embeddings()(states[None])[0]
        return logits[:, : self.vocab_size]

    def _new_graphs(self) -> GraphedForward | None:
        if self.device.type != "cuda" or self.attention.name != "triton":
            return None
        heads = int(self.config.num_attention_heads)
        return GraphedForward(
            self._outputs, partial(CudaGraphRecorder, self.device), heads, self.layers, self._most_rows
        )

    def bound_rows(self, most: int) -> None:
        """State the most rows that a step will have, for which CUDA graphs hold buffers."""
        self._most_rows = most
        self.graphs = self._new_graphs()

    def _outputs(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, plan: AttentionPlan
    ) -> tuple[torch.Tensor, ...]:
        """Run the module: ids and positions `[1, T]`, rows `[R]` -> logits `[R, V]`, and states `[R, H]` if kept."""
        before = running.set(plan)
        try:
            out = self.module(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
        finally:
            running.reset(before)
        logits: torch.Tensor = out.logits[0]
        if len(logits) != len(rows):
            raise _Unserved(architecture.ALL_LOGITS, f"{len(logits)} rows came, {len(rows)} were asked for")
        return (logits,) if self._seen_states is None else (logits, self._seen_states)

    @torch.inference_mode()
    def linear_logits(self, ids: list[int]) -> torch.Tensor:
        """Return logits `[T, V]` of a plain forward pass with transformers' own attention, as a reference."""
        self.module.set_attn_implementation("eager")
        try:
            row = torch.tensor([ids], device=self.device)
            logits: torch.Tensor = self.module(input_ids=row, use_cache=False).logits
        finally:
            self.module.set_attn_implementation(ATTENTION)
        return logits[0, :, : self.vocab_size]

    def _probe(self) -> tuple[LayerShape, ...]:
        """Run one tiny forward pass and return the shapes that every layer passes to its attention."""
        probe = _Probe()
        rows = torch.tensor([1], device=self.device)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        batch = PackedBatch((), ids, torch.arange(2, device=self.device)[None], rows, ())
        try:
            self.forward(batch, probe)
        except _Unserved as error:
            raise refused(self.label, error.why, error.facts) from error
        except Exception as error:
            raise refused(self.label, architecture.FAILING, f"{type(error).__name__}: {error}") from error
        layers = int(self.config.num_hidden_layers)
        if sorted(probe.layers) != list(range(layers)):
            raise refused(self.label, architecture.OTHER_LAYERS, f"{len(probe.layers)} of {layers} layers")
        self._check_windows(probe)
        return tuple(probe.layers[i][0] for i in range(len(probe.layers)))

    def _check_windows(self, probe: _Probe) -> None:
        """Raise ModelRefused if a window of the configuration does not reach the attention function."""
        kinds = getattr(self.config, "layer_types", None)
        windows = [probe.layers[i][1] for i in range(len(probe.layers))]
        if kinds:
            lost = any(k == "sliding_attention" and w is None for k, w in zip(kinds, windows, strict=False))
        else:
            window = getattr(self.config, "sliding_window", None) or self.max_sequence
            used = getattr(self.config, "use_sliding_window", True) and window < self.max_sequence
            lost = used and all(w is None for w in windows)
        if lost:
            raise refused(self.label, architecture.LOST_WINDOW)


def _padded(rows: torch.Tensor, least: int) -> torch.Tensor:
    """Repeat the last of `[..., n]`, which routes to no further expert, up to `least`."""
    count = rows.shape[-1]
    missing = least - count if count else 0
    return torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], dim=-1) if missing > 0 else rows


class Timer:
    """Times a forward pass on a device. A GPU's is over some time after its call has returned."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._seconds = -perf_counter()
        if self._events:
            self._events[0].record(torch.cuda.current_stream(device))

    def stop(self) -> None:
        """Note the end of the work that was given to the device so far."""
        self._seconds += perf_counter()
        if self._events:
            self._events[1].record(torch.cuda.current_stream(self._events[0].device))

    def seconds(self) -> float:
        """Return how long the forward pass took, as soon as it is over."""
        if self._events:
            begun, ended = self._events
            ended.synchronize()
            self._seconds = 1e-3 * begun.elapsed_time(ended)
        return self._seconds


class _Probe:
    """An attention plan over an empty pool that records shapes and computes nothing."""

    def __init__(self) -> None:
        self.pool = KVPool((), 0, dtype=torch.float32)
        self.layers: dict[int, tuple[LayerShape, int | None]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        self.layers[layer] = (LayerShape(key.shape[1], key.shape[3], value.shape[3]), scoring.window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class _Unserved(Exception):
    """A layer was found that cannot be served, where the model's label is not known."""

    def __init__(self, why: str, facts: str) -> None:
        super().__init__(why)
        self.why = why
        self.facts = facts


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers calls it in every layer: query `[1, Hq, T, D]` and so on -> `[1, T, Hq, Dv]`."""
    if attention_mask is not None:  # transformers builds none for ATTENTION
        raise _Unserved(architecture.OWN_MASK, type(module).__name__)
    if position_bias is not None:
        raise _Unserved(architecture.POSITION_BIAS, type(module).__name__)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, sliding_window, softcap, s_aux)
    return running.get().attend(module.layer_idx, query, key, value, scoring), None


def _install(module: Any, label: str) -> None:
    """Make the module call `_attention` in every layer. Raises ModelRefused if it cannot."""
    AttentionInterface.register(ATTENTION, _attention)
    try:
        module.set_attn_implementation(ATTENTION)
    except (ValueError, ImportError) as error:
        raise refused(label, architecture.OWN_ATTENTION) from error
    if module.config.get_text_config()._attn_implementation != ATTENTION:
        raise refused(label, architecture.OWN_ATTENTION)


def _read_module(directory: Path, dtype: torch.dtype) -> Any:
    """Read a model directory. Raises ModelRefused."""
    try:
        module, loading = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except Exception as error:
        if (kind := _model_type(directory)) and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise refused(f"{directory} (model type {kind})", architecture.UNKNOWN_TYPE) from error
        raise ModelRefused(f"{directory} does not load: {type(error).__name__}: {error}") from error
    if lost := sorted(loading["missing_keys"]):  # transformers fills them with random numbers
        raise ModelRefused(
            f"{directory} lacks {len(lost)} of the model's tensors, such as {lost[0]}; download it again"
        )
    return module


def _model_type(directory: Path) -> str:
    """Return the type that the model's configuration states; empty if it states none."""
    try:
        return str(json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()
