"""Sample completions from prompts."""
