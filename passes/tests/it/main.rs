//! The integration tests of passes, in one program.

mod group;
mod precision;
mod rewrite;
mod schedule_search;
mod schedules;
mod table;
