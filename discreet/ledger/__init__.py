"""Spent privacy on disk, and the budgets that it is held to."""
