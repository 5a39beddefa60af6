"""A server that answers OpenAI's sampling API and Tinker's training API."""
