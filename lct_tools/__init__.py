"""Commands of `lct` around a run: models, tokenizers, the machine, pages about runs. Only `lct` calls them."""
