"""Messages between server and nodes, typed and versioned."""
