"""Draft on the verifier for sessions whose devices draft nothing, as long as that pays."""
