//! The text of the IR: the debugger, the test format and the documentation at once.
//!
//! ```text
//! module  := "mesh" "[" { axis "=" size "," } "]" [ "phase" name ] { state } { layout } { func }
//! state   := "state" name ":" dtype "of" ( "param" | "run" ) "=" ( number | "file" )
//! layout  := "layout" "\"" name "\"" "%" name "in" "\"" path "\"" ":" type "once" number "back" number
//!            [ "frozen" ] "{" { op [ "[" attributes "]" ] ":" type } "}"
//! func    := "func" "@" name "(" { "%" name ":" type [ role [ weight ] ] [ asked ] "," } ")"
//!            "->" results "{" { line } [ return ] "}"
//! results := type | "(" { [ "%" name ":" ] type [ role ] "," } ")"   // named: no return
//! role    := kind [ "[" name | number "]" ] "\"" name "\""   // state[exp_avg], grad_from[1]
//! line    := path [ "stage" number ] [ "forward" | "backward" | "weight" ] ":"
//!          | { "%" name "," } "=" op [ "[" attributes "]" ] { "%" name "," }
//!            ":" { type [ asked ] [ "residual=" dim ] "," } [ "//" note ]
//! return  := "return" ( { "%" name "," } | "(" { "%" name "," } ")" )
//! type    := dtype "[" { size [ "@" [ "-" ] atoms ] "," } "]" [ "~" atoms ] [ "!" atoms ] [ "+" atoms ]
//!            [ "max:" atoms ] [ "min:" atoms ]
//! atoms   := axis [ ":(" pre ")" size ] { "*" … }
//! asked   := "@(" { [ atoms ] [ "?" ] | "-" "," } ")" [ "p" priority ]
//! weight  := "[" { "ones" | "zeros" | "normal=" deviation | "tp_dim=" dim | "experts=" count
//!            | "tensor=" "\"" name "\"" | "part=" dim ":" start ":" size ";" } "]"
//! ```
//!
//! A model's text may end with how its parameters are updated: lines `group "GLOB[+GLOB…]=RULE[,ATTRIBUTE=VALUE…]"`,
//! later ones win, and the rules that they name ([`update`]).
//!
//! `phase` and `layout` stand between two passes alone: how far the module is, and how parameters are
//! made ready ([`ParamLayout`](crate::func::ParamLayout)).
//! `weight` and `residual` stand in models alone: what a frontend knows of them beside the program
//! ([`parse_source`]).
//!
//! One op stands on one line; a line `path:` says in which scope the ops after it stand (a lone `:`
//! is the empty path, in which a function begins; `""` is the same before other words). Where a program is
//! not yet cut into functions, the line also names the stage of the scope, if that is not 0, and the part of
//! the ops, if that is not forward. What somebody asked of a value's sharding, an
//! [`Annotation`](crate::func::Annotation), follows its type: `?` may be split further, `-` is
//! whole. A collective whose last attribute is `keep`, `all_reduce[tp; keep]`, stands as somebody wants it: no pass
//! makes another of it. `//` on any other line begins a comment, which is not kept.
//!
//! Lines of layers that differ only in their layer numbers are printed once (see [`Repeat`]):
//!
//! ```text
//! repeat i in 0..=31, %l{i-1}.y at 0 is %h {
//!   %l{i}.a = gelu %l{i-1}.y : f32[4,16]
//! }
//! ```
//!
//! `31..=0` counts down, `0..=30 by 2` in steps; `P at K is V` gives the value that stands for `P`
//! in iteration K. This is folding of text and nothing else: [`expand`] undoes it before any line
//! is read, so a folded and an unrolled text are the same module.

mod cursor;
mod expand;
mod fold;
mod items;
mod marks;
mod mesh;
mod near;
mod op;
mod params;
mod parse;
mod place;
mod print;
mod states;
mod types;
mod unknown;
pub mod update;

pub use expand::{Expanded, MAX_BYTES, MAX_COUNT, MAX_LINES, expand};
pub(crate) use items::MAX_DIMS;
pub use items::parse_type;
pub use params::says_phase;
pub use parse::is_path;
pub use parse::{parse, parse_source, parse_source_on};
pub use place::in_file;
pub use print::{NodeText, Repeat, node_text, print, print_between, print_source, print_with};
pub use types::{annotation_text, type_text, write_type};
pub(crate) use types::{push_number, quoted};
