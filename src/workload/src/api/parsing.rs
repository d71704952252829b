//! The objects in the answers of an API server, without the record of who has set which field
//! (`managedFields`). Pure.
//!
//! Nothing on a node reads that record, which is half of an object. The API server takes it from
//! the writer of the object, and keeps names in it that are not fields, nested up to its own limit
//! of 10,000. `serde_json` rejects a text that is nested more than 128 times: a claim with such a
//! record would stop the provisioners of all workers, a pod the drain of its node, and a Node the
//! removal of other ones.
//!
//! Invariants:
//! - The record is passed over without recursion, so its depth needs no stack.
//! - All else is bounded by `serde_json`; the API server gives it the depth of its kind.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// The name of the record.
const RECORD: &str = "managedFields";

/// Reads a text of JSON without each `managedFields` in it.
///
/// # Errors
///
/// The text is not JSON, or is nested too deeply elsewhere.
pub(crate) fn parse(text: &[u8]) -> Result<Value, serde_json::Error> {
    serde_json::from_slice(text).map(|Plain(value)| value)
}

/// A value without that record.
struct Plain(Value);

impl<'de> Deserialize<'de> for Plain {
    fn deserialize<D: Deserializer<'de>>(text: D) -> Result<Self, D::Error> {
        text.deserialize_any(Reader).map(Self)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut text: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Plain(value)) = text.next_element()? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut text: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = text.next_key::<String>()? {
            if name == RECORD {
                text.next_value::<IgnoredAny>()?;
            } else {
                let Plain(value) = text.next_value()?;
                object.insert(name, value);
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    /// The record of a field that nests `depth` times, as a writer may send it: the API server
    /// reads 10,000.
    pub(crate) fn record(depth: usize) -> String {
        format!(r#"[{{"fieldsV1":{}{{}}{}}}]"#, r#"{"f:a":"#.repeat(depth), "}".repeat(depth))
    }

    #[test]
    fn a_record_of_any_depth_is_left_out_and_the_object_is_read() {
        let object = |record: &str| {
            format!(r#"{{"metadata":{{"managedFields":{record},"name":"a"}},"spec":{{}}}}"#)
        };
        let plain = json!({"metadata": {"name": "a"}, "spec": {}});
        for depth in [0, 1, 200, 9_000] {
            assert_eq!(parse(object(&record(depth)).as_bytes()).unwrap(), plain, "{depth}");
        }
        serde_json::from_str::<Value>(&object(&record(200))).unwrap_err();
        parse(object("[").as_bytes()).unwrap_err();
    }

    #[test]
    fn all_else_is_read_as_it_is() {
        let text = r#"[null, true, -1, 18446744073709551615, 1.5, "\u0001\"", {"b": [{}]}]"#;
        let expected: Value = serde_json::from_str(text).unwrap();
        assert_eq!(parse(text.as_bytes()).unwrap(), expected);
        let deep = "[".repeat(10_000);
        for text in ["", "{", "[1,]", r#"{"a" 1}"#, "{} {}", deep.as_str()] {
            parse(text.as_bytes()).unwrap_err();
        }
    }
}
