# What programs called otherwise before: applied with `sed -E -f` to the text of a program of plans of schema 8, or to
# any text that quotes some. tests/renames/run applies it to the whole tree.

# Functions of a step.
s/@enter\b/@step_prologue/g
s/@finish\b/@optimizer_step/g

# Roles, before their names in quotes.
s/\bready (\\?")/unsharded \1/g
s/\bload (\\?")/tokens_per_expert \1/g

# Ops, before their attributes or operands.
s/\bplace\[([^]; ]+; ?)/pad_to_partial[\1/g
s/\bpiece\[([^]; ]+; ?)/ring_shard[\1/g
s/\bput\[([a-z0-9,]+->)/index_add[\1/g
s/\bwiden\[([a-z]+=)/pad[\1/g
s/\brow_dots\b/combine_gates_grad/g
s/\bcombine (%|f32|bf16|f16|\{)/unpermute \1/g
