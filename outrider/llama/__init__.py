"""Run the draft model on llama.cpp: the only package that imports llama_cpp.

`model` loads and quantises GGUF files, `tree_context` grows and commits a token tree and measures what a decode takes,
`context` is the base of all contexts, and reads known texts and extends many sequences at once.
"""

from outrider.llama.context import ChainContext, TextContext
from outrider.llama.model import LlamaModel
from outrider.llama.tree_context import ContextFull, TreeContext, TreeFull, measure_widths

__all__ = ["ChainContext", "ContextFull", "LlamaModel", "TextContext", "TreeContext", "TreeFull", "measure_widths"]
