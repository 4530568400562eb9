"""Commands of `lct` around a run: estimates, plans, data, models, tokenizers, machines, reports."""
