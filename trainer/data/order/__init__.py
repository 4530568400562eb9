"""The order in which streams read documents, and several sources by weights."""
