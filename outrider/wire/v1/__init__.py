"""Generated stubs; `make proto` writes them."""
