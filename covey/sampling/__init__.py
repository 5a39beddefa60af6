"""From a prompt to its completions."""
