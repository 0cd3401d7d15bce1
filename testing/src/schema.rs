//! JSON Schema (draft 2020-12), of the keywords that ours use; others are refused, so that none is passed over.

use serde_json::Value as Json;

/// Keywords that say something to people alone.
const WORDS: [&str; 5] = ["$schema", "$id", "title", "description", "$defs"];
/// Those that are checked.
const CHECKED: [&str; 9] = [
    "type",
    "enum",
    "const",
    "items",
    "required",
    "properties",
    "additionalProperties",
    "$ref",
    "anyOf",
];

/// Where a value is not as a schema has it, if it is not.
///
/// # Panics
/// If the schema has a keyword that is not known, or refers to what it does not have.
pub fn misfit(schema: &Json, value: &Json) -> Option<String> {
    of(schema, schema, value, "value")
}

fn list(v: &Json) -> &[Json] {
    v.as_array().map_or(&[], Vec::as_slice)
}

fn fits(kind: &str, v: &Json) -> bool {
    match kind {
        "string" => v.is_string(),
        "boolean" => v.is_boolean(),
        "integer" => v.is_u64() || v.is_i64(),
        "number" => v.is_number(),
        "null" => v.is_null(),
        "array" => v.is_array(),
        "object" => v.is_object(),
        _ => panic!("no type is called {kind}"),
    }
}

fn of(root: &Json, schema: &Json, v: &Json, at: &str) -> Option<String> {
    let keys = schema.as_object()?;
    for k in keys.keys() {
        assert!(WORDS.contains(&&**k) || CHECKED.contains(&&**k), "{at}: keyword {k}");
    }
    if let Some(to) = schema["$ref"].as_str() {
        let name = to.strip_prefix("#/$defs/").unwrap_or_else(|| panic!("$ref {to}"));
        let there = root["$defs"].get(name).unwrap_or_else(|| panic!("no $defs/{name}"));
        return of(root, there, v, at);
    }
    let ways = list(&schema["anyOf"]);
    if !ways.is_empty() {
        let found: Vec<String> = ways.iter().filter_map(|w| of(root, w, v, at)).collect();
        if found.len() == ways.len() {
            return Some(found.join("; "));
        }
    }
    let types: Vec<&str> = match &schema["type"] {
        Json::String(one) => vec![one],
        Json::Array(all) => all.iter().filter_map(Json::as_str).collect(),
        _none => vec![],
    };
    if !types.is_empty() && !types.iter().any(|t| fits(t, v)) {
        return Some(format!("{at} is not {types:?}: {v}"));
    }
    let known = schema["enum"].as_array().is_none_or(|all| all.contains(v));
    if !known || schema.get("const").is_some_and(|c| c != v) {
        return Some(format!("{at}: {v}"));
    }
    for (i, x) in list(v).iter().enumerate().filter(|_| schema["items"].is_object()) {
        if let Some(m) = of(root, &schema["items"], x, &format!("{at}[{i}]")) {
            return Some(m);
        }
    }
    let own = v.as_object()?;
    let mut wanted = list(&schema["required"]).iter().filter_map(Json::as_str);
    if let Some(k) = wanted.find(|k| !own.contains_key(*k)) {
        return Some(format!("{at} lacks {k}"));
    }
    own.iter().find_map(|(k, x)| {
        let here = format!("{at}.{k}");
        match (schema["properties"].get(k), &schema["additionalProperties"]) {
            (Some(s), _) => of(root, s, x, &here),
            (None, Json::Bool(false)) => Some(format!("{here} is not in the schema")),
            (None, s) => of(root, s, x, &here),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_does_not_fit_is_named() {
        let schema = json!({
            "type": "object", "required": ["a"], "additionalProperties": false,
            "properties": {
                "a": { "type": ["integer", "null"] },
                "b": { "type": "array", "items": { "$ref": "#/$defs/word" } },
                "c": { "anyOf": [{ "const": 1 }, { "type": "boolean" }] },
            },
            "$defs": { "word": { "enum": ["x", "y"] } },
        });
        for (value, at) in [
            (json!({ "a": 1, "b": ["x", "y"], "c": true }), None),
            (json!({ "a": null, "c": 1 }), None),
            (json!([]), Some("value is not")),
            (json!({}), Some("lacks a")),
            (json!({ "a": 1.5 }), Some("value.a")),
            (json!({ "a": 1, "b": ["x", "z"] }), Some("value.b[1]")),
            (json!({ "a": 1, "c": 2 }), Some("value.c")),
            (json!({ "a": 1, "d": 2 }), Some("value.d is not in the schema")),
        ] {
            let found = misfit(&schema, &value);
            match at {
                None => assert_eq!(found, None, "{value}"),
                Some(at) => {
                    assert!(found.clone().is_some_and(|f| f.contains(at)), "{value}: {found:?}")
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "keyword pattern")]
    fn what_is_not_checked_is_refused() {
        misfit(&json!({ "pattern": "x" }), &json!("y"));
    }
}
