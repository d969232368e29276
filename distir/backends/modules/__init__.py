"""Modules of torch as models: exported in memory, their weights read from them and handed back."""
