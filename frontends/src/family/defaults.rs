//! Sizes that transformers' classes assume where a config says nothing, as [`super::Absent`] has of other keys.

use serde_json::{Map, Value};
use std::sync::LazyLock;

/// By `model_type`, also of text models that others hold; made of the classes of transformers 5.23.
static BY_TYPE: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    serde_json::from_str(include_str!("defaults.json")).expect("a table of objects")
});

/// The keys of a type, each with its value where it is absent.
pub(super) fn of(model_type: &str) -> Option<&'static Map<String, Value>> {
    BY_TYPE.get(model_type)?.as_object()
}
