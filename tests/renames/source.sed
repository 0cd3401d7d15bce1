# The same names in the sources: Rust, CUDA, Python, docs. Applied with `sed -E -f` after programs.sed, by tests/renames/run.

# Roles.
s/RoleKind::Ready\b/RoleKind::Unsharded/g
s/RoleKind::Load\b/RoleKind::TokensPerExpert/g
s/\bParam, Ready\b/Param, Unsharded/g
s/\bParam \| Ready\b/Param | Unsharded/g
s/RoleKind::Unsharded => "ready"/RoleKind::Unsharded => "unsharded"/
s/RoleKind::TokensPerExpert => "load"/RoleKind::TokensPerExpert => "tokens_per_expert"/
s/\b(holds|taken)\((.*)"finish(\.0)?"/\1(\2"optimizer_step\3"/

# Functions of a step, and what traces and reports call by their names.
s/FuncKind::Enter\b/FuncKind::StepPrologue/g
s/FuncKind::Finish\b/FuncKind::OptimizerStep/g
s/FuncKind::StepPrologue => "enter"/FuncKind::StepPrologue => "step_prologue"/
s/FuncKind::OptimizerStep => "finish"/FuncKind::OptimizerStep => "optimizer_step"/
s/(\.func|Func::new|starts_with)\("enter"\)/\1("step_prologue")/g
s/\["enter", "forward"/["step_prologue", "forward"/
s/op: "finish"\.into/op: "optimizer_step".into/
s/(\.func|Func::new|starts_with)\("finish"\)/\1("optimizer_step")/g
s/name == "finish"/name == "optimizer_step"/g
s/\["name"\] == "finish"/["name"] == "optimizer_step"/g
s/"name": "finish"/"name": "optimizer_step"/g
s/"enter" if e\[/"step_prologue" if e[/
s/"finish" if e\[/"optimizer_step" if e[/
s/\("enter", Some\(r\)\)/("step_prologue", Some(r))/
s/\("finish", Some\(r\)\)/("optimizer_step", Some(r))/
s/"enter\.([0-9])"/"step_prologue.\1"/g
s/"finish\.([0-9])"/"optimizer_step.\1"/g
s/found\.replace\("finish", ""\)/found.replace("optimizer_step", "")/

# Ops.
s/\bWiden\b/Pad/g
s/\bwiden::/pad::/g
s/^pub mod widen;/pub mod pad;/
s/\bmoves::widen\(/moves::pad(/g
s/fn widen\(l: &Layout/fn pad(l: \&Layout/
s/`widen`/`pad`/g
s/"widen"/"pad"/g
s/^### widen$/### pad/
s/\bRowDots\b/CombineGatesGrad/g
s/\bPut\b(\(|\)| \{|,|\}|$|::| =|\.| =>|;)/IndexAdd\1/g
s/ put\(const Params p\)/ index_add(const Params p)/
s/\bput\.cu\b/index_add.cu/g
s/\bput::IndexAdd\b/index_add::IndexAdd/g
s/^pub mod put;/pub mod index_add;/
s/\bmoves::put\(/moves::index_add(/g
s/fn put\((k: &Pick|l: &Layout)/fn index_add(\1/
s/^\/\/ put:/\/\/ index_add:/
s/ put reads the/ index_add reads the/
s/`put`/`index_add`/g
s/"put"/"index_add"/g
s/^### put$/### index_add/
s/\bCombine\b/Unpermute/g
s/\bcombine::Unpermute\b/unpermute::Unpermute/g
s/^pub mod combine;/pub mod unpermute;/
s/`combine`/`unpermute`/g
s/"combine"/"unpermute"/g
s/^### combine$/### unpermute/
s/\bexperts::combine\(/experts::unpermute(/g
s/fn combine\(k: &Copies/fn unpermute(k: \&Copies/
s/ combine\(const Params p\)/ unpermute(const Params p)/
s/^\/\/   combine:/\/\/   unpermute:/
s/\b(Op::|layout::)Place\b/\1PadToPartial/g
s/\bPlace \{ axes/PadToPartial { axes/g
s/\bPlace = "pad_to_partial"/PadToPartial = "pad_to_partial"/
s/\b(Op::|layout::)Piece\b/\1RingShard/g
s/\bPiece \{ axes/RingShard { axes/g
s/\bPiece = "ring_shard"/RingShard = "ring_shard"/

# What an article stands before.
s/\b([Aa]) `(unpermute|index_add)`/\1n `\2`/g
