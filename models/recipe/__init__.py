"""The recipe of the demo pair: corpus, tokenizer, target, drafts, export, evaluation.

Run it with ``python -m models.recipe run --data DIR --work DIR``. Every stage leaves a marker in the work
directory and is skipped when it finds one, so an interrupted run goes on where it stopped.
"""
