"""A site's guard: runs a stranger's app on blocks of patients, and releases one noised mean."""
