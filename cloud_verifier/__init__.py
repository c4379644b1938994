"""The cloud side: verifies many devices' token trees in one batched forward pass of the target model."""
