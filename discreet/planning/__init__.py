"""A run before it starts: its plan with every number decided, what it costs, and what to expect."""
