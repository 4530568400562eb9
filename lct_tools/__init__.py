"""Commands of `lct` around a run: checks, estimates, plans, data, models, tokenizers, machines, reports."""
