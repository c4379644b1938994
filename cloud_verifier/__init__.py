"""Verify many devices' token trees in one batched forward pass of the target model."""
