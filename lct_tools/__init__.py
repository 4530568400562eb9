"""Commands of `lct` that prepare a run: models and tokenizers. Only the program `lct` calls them."""
