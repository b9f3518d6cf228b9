"""Private ratings and statistics at the server, and tables of predictions."""
