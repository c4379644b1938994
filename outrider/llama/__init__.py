"""Run the draft model on llama.cpp: the only package that imports llama_cpp.

`model` loads and quantises GGUF files, `tree_context` grows and commits a token tree and measures what a decode takes,
`chain_context` extends many sequences at once, `context` is their common base and reads known texts.
"""

from outrider.llama.chain_context import ChainContext
from outrider.llama.context import TextReader
from outrider.llama.model import LlamaModel
from outrider.llama.tree_context import ContextFull, TreeContext, TreeFull, measure_widths

__all__ = ["ChainContext", "ContextFull", "LlamaModel", "TextReader", "TreeContext", "TreeFull", "measure_widths"]
