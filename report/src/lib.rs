//! What a plan is and costs, for people: reports, pictures, a page, and why each collective is there.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod explain;
pub mod inspect;
pub mod page;
pub mod pictures;
pub mod prices;
pub mod proof;
pub mod report;
