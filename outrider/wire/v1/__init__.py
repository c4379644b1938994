"""Hold the generated stubs, which `make proto` writes."""
