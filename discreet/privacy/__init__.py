"""The privacy core: pure functions and frozen values over torch and dp_accounting."""
