//! How options are shown in reports.

use crate::stored::Stored;
use shardc_ir::plan::{Mode, TokenOrder};
use shardc_passes::options::Options;
use std::fmt::{Debug, Display};

/// Something is trained.
pub fn trains(o: &Options) -> bool {
    o.mode == Mode::Train
}

/// What has a meaning where something is trained.
pub fn trained(s: &Stored, x: impl Display) -> Option<String> {
    trains(&s.options).then(|| x.to_string())
}

/// What has a meaning for a model with experts.
pub fn of_experts(s: &Stored, x: String) -> Option<String> {
    s.facts.and_then(|f| f.experts).map(|_| x)
}

/// The plan has tensor parallelism.
pub fn tp(s: &Stored) -> bool {
    s.options.axis("tp") > 1
}

/// A switch, in a word.
pub fn yes(x: bool) -> String {
    if x { "yes" } else { "no" }.into()
}

/// The name of a value, in lower case.
pub fn lower(x: &dyn Debug) -> String {
    format!("{x:?}").to_lowercase()
}

/// How attention goes over cp, and how tokens are dealt.
pub fn context(o: &Options) -> String {
    let tokens = match o.tokens() {
        TokenOrder::Zigzag { .. } => "zigzag",
        TokenOrder::Contiguous => "contiguous",
    };
    format!("{}, {tokens}", o.cp_mode.name())
}
