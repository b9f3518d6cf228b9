"""The record of spent privacy on disk, and its budgets."""
