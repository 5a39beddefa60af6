"""Commands besides training: check a recipe, list the built-in recipes, complete words in a shell."""
