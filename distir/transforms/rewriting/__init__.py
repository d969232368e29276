"""Rewrites of sequential programs: fusion, decomposition, folding, cleanup; and checks of what each rewrite claims."""
