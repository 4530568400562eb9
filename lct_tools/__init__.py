"""Commands of `lct` around a run: models, tokenizers, the machine. Only the program `lct` calls them."""
