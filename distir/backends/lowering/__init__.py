"""Lowering: generate Python over torch calls from a rank's program."""
