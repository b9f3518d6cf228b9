"""A run at the server: plan, rounds, state, optimizer, run folder, stopping."""
