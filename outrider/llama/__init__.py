"""The draft model on llama.cpp: the only package that imports llama_cpp.

`model` a loaded GGUF, `tree_context` the decoder that grows and commits a token tree, `timing` what a decode costs by
width, `quantize` GGUF to smaller GGUF.
"""

from outrider.llama.model import LlamaModel
from outrider.llama.timing import measure_widths
from outrider.llama.tree_context import ContextFull, TreeContext, TreeFull

__all__ = [
    "ContextFull",
    "LlamaModel",
    "TreeContext",
    "TreeFull",
    "measure_widths",
]
