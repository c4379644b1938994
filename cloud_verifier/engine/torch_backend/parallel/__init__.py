"""Run one target over several ranks: tensor parallelism, the ranks' devices, and the messages between ranks."""
