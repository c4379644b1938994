"""The draft model on llama.cpp: the only package that imports llama_cpp.

`model` a loaded GGUF, `adapter` a LoRA for it, `tree_context` the decoder that grows and commits a token tree,
`chain_context` one that extends many sequences at once, `reader` one that scores known texts, `context` what they stand
on, `timing` what a decode costs by width, `quantize` GGUF to smaller GGUF.
"""

from outrider.llama.adapter import LoraAdapter
from outrider.llama.chain_context import ChainContext
from outrider.llama.model import LlamaModel
from outrider.llama.reader import TextReader
from outrider.llama.timing import measure_widths
from outrider.llama.tree_context import ContextFull, TreeContext, TreeFull

__all__ = [
    "ChainContext",
    "ContextFull",
    "LlamaModel",
    "LoraAdapter",
    "TextReader",
    "TreeContext",
    "TreeFull",
    "measure_widths",
]
