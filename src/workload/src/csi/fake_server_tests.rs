//! An API server of objects in memory, for the tests of its clients.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{Server, VOLUMES};
use crate::api::{self, Answer};
use crate::csi::store::tests::Fake;

const EVENTS: &str = "/api/v1/namespaces/default/events";

/// An API server with a few objects, whose requests are steps of the disk's power, too.
#[derive(Clone, Debug)]
pub(crate) struct Objects {
    disk: Arc<Fake>,
    objects: Arc<Mutex<BTreeMap<String, Value>>>,
    pub(crate) events: Arc<Mutex<Vec<Value>>>,
    /// The status that every request to make a volume gets instead.
    pub(crate) refusal: Arc<Mutex<Option<u16>>>,
    /// How long a request takes.
    pub(crate) takes: Arc<Mutex<Duration>>,
    /// Each request: its method, and the object or the list.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Objects {
    pub(crate) fn new(disk: &Arc<Fake>) -> Self {
        Self {
            disk: disk.clone(),
            objects: Arc::default(),
            events: Arc::default(),
            refusal: Arc::default(),
            takes: Arc::default(),
            asked: Arc::default(),
        }
    }

    /// The requests since the last call.
    pub(crate) fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    pub(crate) fn all(&self) -> MutexGuard<'_, BTreeMap<String, Value>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn put(&self, path: &str, object: Value) {
        self.all().insert(path.to_owned(), object);
    }

    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.all().get(path).cloned()
    }

    fn answer(&self, method: &Method, path: &str, body: Value) -> (u16, Value) {
        let refusal = *self.refusal.lock().unwrap();
        if let Some(status) = refusal.filter(|_| method == Method::POST && path == VOLUMES) {
            return (status, json!({"message": "no"}));
        }
        let present = self.get(path);
        match (method.as_str(), present) {
            ("GET", Some(object)) => (200, object),
            ("POST", _) if path == EVENTS => {
                self.events.lock().unwrap().push(body.clone());
                (201, body)
            }
            ("POST", _) => {
                let path = format!("{path}/{}", body["metadata"]["name"].as_str().unwrap());
                if self.get(&path).is_some() {
                    return (409, json!({}));
                }
                let mut object = body;
                object["metadata"]["uid"] = json!("uid-of-the-object");
                object["metadata"]["resourceVersion"] = json!("1");
                self.put(&path, object.clone());
                (201, object)
            }
            ("PATCH", _) => {
                let path = path.strip_suffix("/status").unwrap_or(path);
                let Some(mut object) = self.get(path) else { return (404, json!({})) };
                let version = &body["metadata"]["resourceVersion"];
                if !version.is_null() && *version != object["metadata"]["resourceVersion"] {
                    return (409, json!({}));
                }
                merge(&mut object, &body);
                let ends = !object["metadata"]["deletionTimestamp"].is_null()
                    && object["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty);
                if ends {
                    self.all().remove(path);
                } else {
                    self.put(path, object.clone());
                }
                (200, object)
            }
            ("DELETE", Some(mut object)) => {
                assert_eq!(body["preconditions"]["uid"], object["metadata"]["uid"]);
                object["metadata"]["deletionTimestamp"] = json!("now");
                self.put(path, object.clone());
                (200, object)
            }
            (_, None) => (404, json!({})),
            (other, _) => panic!("{other} {path}"),
        }
    }
}

/// A merge patch; see RFC 7386.
fn merge(object: &mut Value, patch: &Value) {
    match patch.as_object() {
        Some(fields) => {
            for (field, value) in fields {
                merge(&mut object[field.as_str()], value);
            }
        }
        None => *object = patch.clone(),
    }
}

impl Server for Objects {
    async fn ask(
        &self,
        method: Method,
        path: &str,
        content: Option<(&'static str, Value)>,
    ) -> Result<Answer, api::Error> {
        let lost = |source: std::io::Error| api::Error::Connect {
            address: ([127, 0, 0, 1], 1).into(),
            source,
        };
        let last = path.rsplit_once('/').map_or(path, |(_, last)| last);
        self.asked.lock().unwrap().push(format!("{method} {last}"));
        let takes = *self.takes.lock().unwrap();
        if !takes.is_zero() {
            sleep(takes).await;
        }
        self.disk.step().map_err(lost)?;
        let body = content.map_or(Value::Null, |(_, body)| body);
        let (status, object) = self.answer(&method, path, body);
        // It was done, and the answer is lost.
        self.disk.step().map_err(lost)?;
        Ok(Answer { status, body: object.to_string().into_bytes() })
    }

    fn refused(&self, answer: &Answer) -> api::Error {
        api::Error::refused(([127, 0, 0, 1], 1).into(), answer.status, &answer.body)
    }
}
