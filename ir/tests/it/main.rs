//! The integration tests of texts, types, ops and the interpreter, in one program.

mod boxes;
mod fuzz;
mod halo;
mod house;
mod interp;
mod ops;
mod ops_page;
mod tensor;
mod text;
mod values;
mod verify;
