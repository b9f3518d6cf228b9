"""The files of a run: its folder, ledgers and model, and what is read from them."""
