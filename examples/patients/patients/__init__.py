"""A Flower app for tables of patients: an ordinary one, which knows nothing of privacy."""
