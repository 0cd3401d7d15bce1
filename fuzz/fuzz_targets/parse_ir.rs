//! Any text is read or refused, never more: `cargo +nightly fuzz run parse_ir ../ir/tests/corpus`.
//!
//! What is read is verified, printed and read again. The same property is tested without a nightly
//! compiler by `ir/tests/it/fuzz.rs`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use shardc_ir::text::{Repeat, parse, parse_source, print, print_source, print_with};
use shardc_ir::phase::Phase;
use shardc_ir::verify::verify;

fuzz_target!(|text: &str| {
    if let Ok(s) = parse_source(text) {
        let said = print_source(&s);
        let back = parse_source(&said).expect("what is printed can be read");
        assert_eq!(print_source(&back), said);
    }
    let Ok(m) = parse(text) else { return };
    for phase in Phase::ALL {
        let _ = verify(&m, phase);
    }
    let folded = print(&m);
    let back = parse(&folded).expect("what is printed can be read");
    assert_eq!(print_with(&back, Repeat::Unroll), print_with(&m, Repeat::Unroll));
});
