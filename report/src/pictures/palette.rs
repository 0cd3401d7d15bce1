//! The colours of pictures and pages: one table, in which a thing has the same colour everywhere.
//!
//! They stay apart for people who see few colours, and never stand alone: axes carry their name, actions a
//! letter, kinds of memory a label.

use shardc_ir::plan::MemoryClass;
use shardc_ir::schedule::ActionKind;

/// A colour on light ground and on dark ground.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Colour {
    /// As a page calls it in its style sheet, without `--`.
    pub name: &'static str,
    pub light: &'static str,
    pub dark: &'static str,
}

const fn colour(name: &'static str, light: &'static str, dark: &'static str) -> Colour {
    Colour { name, light, dark }
}

/// All colours. Text and ground first, then actions, memory, axes, and what takes the time of a step.
pub const COLOURS: [Colour; 31] = [
    colour("ink", "#1a1f26", "#e7eaee"),
    colour("muted", "#5a636e", "#9ba5b1"),
    colour("ground", "#f7f7f5", "#0f1216"),
    colour("panel", "#ffffff", "#161a20"),
    colour("line", "#e1e3e2", "#2a3038"),
    colour("over", "#b0203a", "#ff7b8a"),
    colour("idle", "#eceded", "#1d2228"),
    colour("hatch", "#d5d8da", "#55606d"),
    colour("f", "#3f97dc", "#62b5f5"),
    colour("i", "#e69f00", "#f0b23e"),
    colour("w", "#00604c", "#2b8a68"),
    colour("edge", "#8b94a0", "#707b88"),
    colour("weights", "#22456c", "#2e719f"),
    colour("optimizer", "#a9c6ea", "#a4aebe"),
    colour("gradients", "#9c4423", "#db5c25"),
    colour("buffers", "#e3d16b", "#ecdc83"),
    colour("activations", "#b65ebf", "#c27bd8"),
    colour("temporaries", "#7a736e", "#656460"),
    colour("inputs", "#4bc9aa", "#a0ecbc"),
    colour("tp", "#0d8276", "#5fdfe6"),
    colour("dp", "#cf1567", "#f99ac0"),
    colour("pp", "#49559d", "#9489fb"),
    colour("cp", "#8f6607", "#b98f52"),
    colour("ep", "#12440f", "#9ac08d"),
    colour("several", "#38383c", "#8a8989"),
    colour("products", "#2f86d6", "#3f7fd6"),
    colour("attention", "#7fb7e8", "#bcd9f7"),
    colour("kernels", "#e0b64a", "#e8d24a"),
    colour("recompute", "#e8743b", "#ea6a3a"),
    colour("update", "#9aa4ad", "#8e99a6"),
    colour("accent", "#2f6db5", "#6fb1ff"),
];

/// Kinds of memory in the order in which they stand on top of each other.
pub const STACK: [MemoryClass; 7] = [
    MemoryClass::Weights,
    MemoryClass::Optimizer,
    MemoryClass::Grads,
    MemoryClass::CollectiveBuffer,
    MemoryClass::Activation,
    MemoryClass::Temporary,
    MemoryClass::Input,
];

/// The colour of a name.
///
/// # Panics
/// If the table has none of this name.
pub fn named(name: &str) -> Colour {
    *COLOURS.iter().find(|c| c.name == name).expect("a colour of the table")
}

/// The colour of a kind of memory.
pub fn memory(class: MemoryClass) -> Colour {
    named(match class {
        MemoryClass::Weights => "weights",
        MemoryClass::Grads => "gradients",
        MemoryClass::Optimizer => "optimizer",
        MemoryClass::Activation => "activations",
        MemoryClass::CollectiveBuffer => "buffers",
        MemoryClass::Temporary => "temporaries",
        MemoryClass::Input => "inputs",
    })
}

/// The colour of an action; a whole backward is drawn as its first part, with a foot as its second.
pub fn action(kind: ActionKind) -> Colour {
    named(match kind {
        ActionKind::Forward => "f",
        ActionKind::Backward | ActionKind::Input => "i",
        ActionKind::Weight => "w",
    })
}

/// The variables of a style sheet, for light and for dark ground.
pub fn variables() -> (String, String) {
    let all = |of: fn(&Colour) -> &'static str| -> String {
        COLOURS.iter().map(|c| format!("--{}:{};", c.name, of(c))).collect()
    };
    (all(|c| c.light), all(|c| c.dark))
}

/// A light colour mixed half with white: that of a rank's later chunks.
pub fn pale(light: &str, part: f64) -> String {
    let mut out = String::from("#");
    for at in [1, 3, 5] {
        let own = u8::from_str_radix(light.get(at..at + 2).unwrap_or("00"), 16).unwrap_or(0);
        let mixed = f64::from(own) + (255.0 - f64::from(own)) * part;
        out += &format!("{:02x}", mixed.round() as u8);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lightness and two colour axes of CIE Lab (D65) from sRGB.
    fn lab(hex: &str) -> [f64; 3] {
        let channel = |at: usize| {
            let n = u8::from_str_radix(&hex[at..at + 2], 16).expect("two hex digits");
            let x = f64::from(n) / 255.0;
            if x <= 0.04045 { x / 12.92 } else { ((x + 0.055) / 1.055).powf(2.4) }
        };
        let [r, g, b] = [1, 3, 5].map(channel);
        let f = |t: f64| if t > 0.008856 { t.cbrt() } else { 7.787 * t + 16.0 / 116.0 };
        let x = f((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047);
        let y = f(0.2126 * r + 0.7152 * g + 0.0722 * b);
        let z = f((0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883);
        [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
    }

    fn luminance(hex: &str) -> f64 {
        let y = (lab(hex)[0] + 16.0) / 116.0;
        if y.powi(3) > 0.008856 { y.powi(3) } else { (y - 16.0 / 116.0) / 7.787 }
    }

    #[test]
    fn colours_of_a_family_stay_apart() {
        let families: [(&[&str], f64); 4] = [
            (&["f", "i", "w"], 24.0),
            (
                &[
                    "weights",
                    "optimizer",
                    "gradients",
                    "buffers",
                    "activations",
                    "temporaries",
                    "inputs",
                ],
                19.0,
            ),
            (&["tp", "dp", "pp", "cp", "ep", "several"], 15.0),
            (
                &[
                    "products",
                    "attention",
                    "kernels",
                    "recompute",
                    "update",
                    "tp",
                    "dp",
                    "pp",
                    "cp",
                    "ep",
                    "hatch",
                ],
                14.0,
            ),
        ];
        for (names, least) in families {
            for (i, a) in names.iter().enumerate() {
                for b in &names[..i] {
                    for of in [|c: Colour| c.light, |c: Colour| c.dark] {
                        let (x, y) = (lab(of(named(a))), lab(of(named(b))));
                        let far = (0..3).map(|k| (x[k] - y[k]).powi(2)).sum::<f64>().sqrt();
                        assert!(far >= least, "{a} and {b}: {far:.1}");
                    }
                }
            }
        }
    }

    #[test]
    fn text_is_read_on_its_ground() {
        for text in ["ink", "muted", "over"] {
            for ground in ["ground", "panel"] {
                for of in [|c: Colour| c.light, |c: Colour| c.dark] {
                    let (a, b) = (luminance(of(named(text))), luminance(of(named(ground))));
                    let ratio = (a.max(b) + 0.05) / (a.min(b) + 0.05);
                    assert!(ratio >= 4.7, "{text} on {ground}: {ratio:.1}");
                }
            }
        }
    }

    #[test]
    fn names_are_given_once() {
        for (i, c) in COLOURS.iter().enumerate() {
            assert!(COLOURS[..i].iter().all(|o| o.name != c.name), "{}", c.name);
            assert!([c.light, c.dark].iter().all(|h| h.len() == 7 && h.starts_with('#')));
        }
        assert_eq!(pale("#000000", 0.5), "#808080");
    }
}
