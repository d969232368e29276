"""Plans as other tools write them: torchtitan's TOML and Megatron-LM's arguments, written and read.

`conversion` has the functions; `to_torchtitan` and `to_megatron` say what corresponds to what; `option_tables` names
the options, with their source.
"""
