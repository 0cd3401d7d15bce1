//! Any text of update rules is read or refused, never more, and so is each rule for a parameter:
//! `cargo +nightly fuzz run update_rules`. `ir/tests/it/fuzz.rs` tests the same without a nightly compiler.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shardc_ir::text::update::{Rules, Update};
use std::collections::BTreeMap;

fuzz_target!(|text: &str| {
    let Ok(rules) = Rules::parse(text, "rules.ir") else { return };
    for rule in rules.names().into_iter().flat_map(|name| rules.named(name)) {
        for shape in [&[4, 6][..], &[6, 4], &[5]] {
            if !rule.fits(shape) {
                continue;
            }
            let Ok(attrs) = rule.attributes(&BTreeMap::new(), [4, 6], Some(2), shape) else { continue };
            let u = Update { rule: rule.clone(), attrs, stack: false, lr: 1.0, group: 0 };
            let _ = (u.kept(shape.len()), u.fused(), u.func(shape));
        }
    }
});
