//! No statement borrows an event value twice.
//!
//! A borrowed value is locked for its readers until the statement ends, and its owner waits
//! to change it. A reader that borrows it once more waits behind that owner, which waits for
//! the first borrow: neither goes on, and the runtime loses two of its threads.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Block, Expr, ExprMethodCall, Stmt};

use crate::sources::workspace;

/// The folders with services.
const FOLDERS: [&str; 2] = ["src", "tests/harness"];

#[test]
fn no_statement_borrows_a_value_twice() {
    let mut found = Vec::new();
    for folder in FOLDERS {
        each_file(&workspace().join(folder), &mut |file, code| {
            let values = borrowed_twice(code);
            found.extend(values.into_iter().map(|value| format!("{}: {value}", file.display())));
        });
    }
    assert!(found.is_empty(), "borrowed twice in one statement: {found:#?}");
}

#[test]
fn two_borrows_in_one_statement_are_found() {
    let twice = [
        "fn f(s: S) -> T { T { a: g(&s.x.borrow()), b: g(&s.x.borrow()) } }",
        "fn f(s: S) { let t = (s.x.borrow_and_update().a, s.x.borrow().b); }",
        "fn f(s: S) { match s.x.borrow().a { A => drop(s.x.borrow()), B => {} } }",
        "fn f(s: S) { if let Some(a) = &*s.x.borrow() { let b = s.x.borrow().b; } }",
    ];
    for code in twice {
        assert_eq!(borrowed_twice(code).into_iter().collect::<Vec<_>>(), ["s.x"], "{code}");
    }
    let once = [
        "fn f(s: S) { let a = s.x.borrow().a; let b = s.x.borrow().b; }",
        "fn f(s: S) { let t = (s.x.borrow().a, s.y.borrow().a); }",
        "fn f(s: S) { if s.x.borrow().a { let b = s.x.borrow().b; } else { g(&s.x.borrow()) } }",
        "fn f(s: S) { loop { g(&s.x.borrow()); g(&s.x.borrow()); } }",
    ];
    for code in once {
        assert!(borrowed_twice(code).is_empty(), "{code}");
    }
}

fn each_file(folder: &Path, visit: &mut impl FnMut(&Path, &str)) {
    for entry in fs::read_dir(folder).expect("a folder of sources").flatten() {
        let path = entry.path();
        if path.is_dir() {
            each_file(&path, visit);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            visit(&path, &fs::read_to_string(&path).expect("a source is text"));
        }
    }
}

/// The values that one statement of this file borrows while it holds a borrow of them.
fn borrowed_twice(code: &str) -> BTreeSet<String> {
    let mut statements = Statements::default();
    statements.visit_file(&syn::parse_file(code).expect("a source is valid"));
    statements.0
}

#[derive(Default)]
struct Statements(BTreeSet<String>);

impl Statements {
    fn check(&mut self, borrows: Vec<String>) {
        let mut seen = BTreeSet::new();
        for value in borrows {
            if !seen.insert(value.clone()) {
                self.0.insert(value);
            }
        }
    }
}

impl<'a> Visit<'a> for Statements {
    fn visit_stmt(&mut self, statement: &'a Stmt) {
        let mut own = Borrows { all: Vec::new(), inside: false };
        own.visit_stmt(statement);
        self.check(own.all);
        visit::visit_stmt(self, statement);
    }

    /// These borrow what they look at until their last arm or branch ends.
    fn visit_expr(&mut self, expr: &'a Expr) {
        let mut held = Borrows { all: Vec::new(), inside: false };
        let mut inside = Borrows { all: Vec::new(), inside: true };
        match expr {
            Expr::Match(it) => {
                held.visit_expr(&it.expr);
                it.arms.iter().for_each(|arm| inside.visit_expr(&arm.body));
            }
            Expr::If(it) if matches!(*it.cond, Expr::Let(_)) => {
                held.visit_expr(&it.cond);
                inside.visit_block(&it.then_branch);
            }
            Expr::While(it) if matches!(*it.cond, Expr::Let(_)) => {
                held.visit_expr(&it.cond);
                inside.visit_block(&it.body);
            }
            _ => {}
        }
        self.0.extend(held.all.into_iter().filter(|value| inside.all.contains(value)));
        visit::visit_expr(self, expr);
    }
}

/// The values that an expression borrows; those of the blocks in it, too, or not.
struct Borrows {
    all: Vec<String>,
    inside: bool,
}

impl<'a> Visit<'a> for Borrows {
    fn visit_block(&mut self, block: &'a Block) {
        if self.inside {
            visit::visit_block(self, block);
        }
    }

    fn visit_expr(&mut self, expr: &'a Expr) {
        match expr {
            // They run later, or one of several does.
            Expr::Closure(_) | Expr::Async(_) if !self.inside => {}
            Expr::Match(it) if !self.inside => self.visit_expr(&it.expr),
            // The condition ends before the branches, unless it binds a name.
            Expr::If(_) | Expr::While(_) if !self.inside => {}
            _ => visit::visit_expr(self, expr),
        }
    }

    fn visit_expr_method_call(&mut self, call: &'a ExprMethodCall) {
        if (call.method == "borrow" || call.method == "borrow_and_update")
            && call.args.is_empty()
            && let Some(value) = place(&call.receiver)
        {
            self.all.push(value);
        }
        visit::visit_expr_method_call(self, call);
    }
}

/// `self.inputs.snapshot`.
fn place(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Path(path) => path.path.get_ident().map(ToString::to_string),
        Expr::Field(field) => {
            let syn::Member::Named(name) = &field.member else { return None };
            Some(format!("{}.{name}", place(&field.base)?))
        }
        _ => None,
    }
}
