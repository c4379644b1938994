"""Run the draft model on llama.cpp: the only package that imports llama_cpp.

`model` loads a GGUF, `tree_context` grows and commits a token tree, `chain_context` extends
many sequences at once, `reader` scores known texts, `context` is their common base, `timing` measures a decode by
width, `quantize` makes a smaller GGUF.
"""

from outrider.llama.chain_context import ChainContext
from outrider.llama.model import LlamaModel
from outrider.llama.reader import TextReader
from outrider.llama.timing import measure_widths
from outrider.llama.tree_context import ContextFull, TreeContext, TreeFull

__all__ = [
    "ChainContext",
    "ContextFull",
    "LlamaModel",
    "TextReader",
    "TreeContext",
    "TreeFull",
    "measure_widths",
]
