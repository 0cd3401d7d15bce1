//! Pictures of a pipeline schedule: [`timeline`] for a terminal, [`svg`] for a browser, and
//! [`trace`] for a trace viewer. All are made from times alone, simulated or measured.

pub mod measure;
pub mod palette;
#[cfg(test)]
pub mod sample;
pub mod step;
pub mod svg;
pub mod timeline;
pub mod trace;
