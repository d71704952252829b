//! Which member reaches which: a row for each member of etcd, as its own node reports it.
//!
//! A link that fails between two nodes only, or in one direction, is seen here and in no list
//! of nodes.

use ratatui::text::Line;

use super::WIDE;
use super::naming::called_by_id;
use crate::snapshot::{Member, Snapshot};
use crate::theme::{DIM, Mark, PLAIN, STRONG};
use crate::widgets::Row;
use crate::widgets::block::{blank, titled};
use crate::widgets::headline::INDENT;

/// Column of the member that reaches, and of each that it reaches.
const FROM: usize = 24;
const TO: usize = 16;

/// The block; nothing without room for it, or without another member.
pub(super) fn block(snapshot: &Snapshot, width: usize) -> Vec<Line<'static>> {
    let etcd = snapshot.etcd.as_ref().filter(|etcd| etcd.takes_part());
    let members = etcd.map(|etcd| &etcd.members[..]).unwrap_or_default();
    if width < WIDE || members.len() < 2 || FROM + members.len() * TO > width {
        return Vec::new();
    }
    let called = |member: &Member| match member.name.as_str() {
        "" => "(not started)".to_owned(),
        id => called_by_id(snapshot, id),
    };
    let head = Row::default().cell(FROM, STRONG, "Who reaches whom");
    let head = members.iter().fold(head, |row, to| row.cell(TO, DIM, &called(to)));
    let row = |from: &Member| {
        let name = if from.own { STRONG } else { PLAIN };
        let row = Row::indented(INDENT).cell(FROM - INDENT, name, &called(from));
        let cell = |row: Row, to: &Member| {
            let (mark, word) = match &from.reaches {
                _ if from.id == to.id => return row.gap(TO),
                None => (Mark::Idle, "not known"),
                Some(reaches) if reaches.contains(&to.id) => (Mark::Good, "yes"),
                Some(_) => (Mark::Bad, "no"),
            };
            row.cell(TO, mark.style(), &format!("{} {word}", mark.glyph()))
        };
        members.iter().fold(row, cell).line()
    };
    let mut lines = vec![blank(), titled(head, width)];
    lines.extend(members.iter().map(row));
    lines
}
