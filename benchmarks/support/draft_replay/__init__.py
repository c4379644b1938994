"""Record what a draft proposes around known outputs of a target, and replay it in light clients without a model."""
