"""A run at the server: rounds, transports, charges, ratings, questions about data."""
