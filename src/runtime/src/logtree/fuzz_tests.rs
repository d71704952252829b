//! Fuzz target of the log lines of programs.

use polis_fuzz::{Accepted, Target};

use super::Body;
use super::parse::Parser;

#[test]
fn log_lines() {
    let samples = [
        r#"{"level":"warn","ts":"2026-11-20T23:12:40.301139Z","caller":"auth/store.go:1241","msg":"simple token","took":"1 ms","n":3,"o":{"a":[1,2.5e9,null]}}"#,
        "E0103 15:04:05.000001    1234 reflector.go:561] cannot list: refused",
        "Cannot wipe header on device /dev/sda2.",
        "panic: runtime error: index out of range",
    ];
    Target::new("runtime.log_lines").samples(samples).run(|input| {
        let line = String::from_utf8_lossy(input);
        for parser in [Parser::Raw, Parser::Tool, Parser::Json, Parser::Klog] {
            let body = parser.parse(&line);
            let shown = body.to_string();
            if matches!(body, Body::Raw(_)) {
                assert_eq!(shown, line, "a line that is not understood is kept");
            }
        }
        Accepted::Yes
    });
}
