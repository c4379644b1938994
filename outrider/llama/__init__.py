"""The draft model on llama.cpp: the only package that imports llama_cpp.

`model` a loaded GGUF, `tree_context` the decoder that grows and commits a token tree, `top` the best candidates of a
row of logits, `timing` what a decode costs by width.
"""

from outrider.llama.model import LlamaModel
from outrider.llama.timing import measure_widths
from outrider.llama.top import top_candidates, top_log_probs
from outrider.llama.tree_context import ContextFull, TreeContext, TreeFull

__all__ = [
    "ContextFull",
    "LlamaModel",
    "TreeContext",
    "TreeFull",
    "measure_widths",
    "top_candidates",
    "top_log_probs",
]
