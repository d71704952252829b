//! A node on the screen: how it is, and what it waits for and warns of.

use polis_proto::v1;
use polis_tui::ratatui::style::{Color, Modifier, Style};
use polis_tui::snapshot::{Service, ServiceState, StageState};
use polis_tui::{Snapshot, clean, services_down};

use crate::node::View;
use crate::session::Target;
use crate::units;

/// How a node is: a glyph, a word and a colour that always go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mark {
    Good,
    Attention,
    Bad,
}

impl Mark {
    pub(super) fn glyph(self) -> &'static str {
        match self {
            Self::Good => "■",
            Self::Attention => "▲",
            Self::Bad => "!",
        }
    }

    pub(super) fn style(self) -> Style {
        match self {
            Self::Good => Style::new().fg(Color::Green),
            Self::Attention => Style::new().fg(Color::LightYellow),
            Self::Bad => Style::new().fg(Color::LightRed).add_modifier(Modifier::BOLD),
        }
    }
}

/// A node on the screen.
#[derive(Clone, Debug)]
pub(super) struct Card {
    /// Its name or its ID, a cell a character.
    pub(super) called: String,
    pub(super) mark: Mark,
    /// State and health, in words.
    pub(super) word: String,
    pub(super) roles: String,
    pub(super) load: String,
    /// The reason to wait, and notes for a person.
    pub(super) notes: Vec<String>,
    pub(super) target: Option<Target>,
}

impl Card {
    /// `answer` is missing for a node that is not asked, since it is not a member.
    pub(super) fn of(
        node: &v1::NodeInfo,
        target: Option<Target>,
        answer: Option<Result<Snapshot, String>>,
    ) -> Self {
        let mut notes = Vec::new();
        let mut mark = match node.state() {
            v1::NodeState::Up => Mark::Good,
            v1::NodeState::New => {
                notes.push(format!("waits for approval: `polisctl node approve {}`", node.id));
                Mark::Attention
            }
            v1::NodeState::Unspecified | v1::NodeState::Standby | v1::NodeState::Decommissioned => {
                Mark::Attention
            }
        };
        if let Some(advice) = View::of(node).return_of_former_voter() {
            mark = Mark::Bad;
            notes.push(format!(
                "it was a voter before the cluster was restored from a snapshot; {advice}"
            ));
        } else if View::of(node).asks_to_return() {
            mark = Mark::Attention;
            notes.push(format!(
                "asks for a new certificate, since it was off for long: `polisctl node approve {}`",
                node.id
            ));
        } else if node.state() == v1::NodeState::Up && node.health() == v1::NodeHealth::Late {
            mark = Mark::Bad;
            notes.push(format!(
                "its heartbeat is overdue; if its machine is lost: `polisctl node delete {} --force`",
                node.id
            ));
        }
        let is_unknown = matches!(node.health(), v1::NodeHealth::Unknown | v1::NodeHealth::Absent);
        if node.state() == v1::NodeState::Up && is_unknown {
            mark = mark.max(Mark::Attention);
            notes.push("the leader has no heartbeat of it yet".to_owned());
        }
        let mut load = String::new();
        match answer {
            None => {}
            Some(Err(reason)) => {
                mark = Mark::Bad;
                notes.push(format!("does not answer: {reason}"));
            }
            Some(Ok(snapshot)) => {
                load = loads(&snapshot);
                let asks = needs(&snapshot);
                if !asks.is_empty() {
                    mark = mark.max(Mark::Attention);
                }
                // The console marks one that stays dead as an error, too.
                if snapshot.services.iter().any(|it| it.state == ServiceState::Dead) {
                    mark = Mark::Bad;
                }
                notes.extend(asks);
            }
        }
        let word = View::of(node).standing();
        let called = if node.name.is_empty() { &node.id } else { &node.name };
        let called = clean(called).into_owned();
        let roles = View::of(node).roles_text();
        Self { called, mark, word, roles, load, notes, target }
    }
}

/// The waits, the dead services and the warnings of a node.
fn needs(snapshot: &Snapshot) -> Vec<String> {
    let waits = snapshot.stages.iter().filter_map(|stage| match &stage.state {
        StageState::Waiting { what, since } => {
            Some(format!("{} waits for {what} ({})", stage.name, units::span(*since)))
        }
        StageState::Failed => Some(format!("{} failed", stage.name)),
        StageState::Pending | StageState::Started | StageState::Done => None,
    });
    let warns = snapshot.warnings.iter().map(|warning| match &warning.help {
        // The text leads to it.
        Some(help) if warning.text.ends_with(':') => format!("{} `{help}`", warning.text),
        _ => warning.text.clone(),
    });
    let down = services_down(&snapshot.services);
    let down = down.iter().map(|(name, service)| died(name, service));
    waits.chain(down).chain(warns).collect()
}

/// A service that is down, and why.
fn died(name: &str, service: &Service) -> String {
    let state = match service.state {
        ServiceState::Dead => "dead",
        _ => "restarting",
    };
    match &service.cause {
        Some(cause) => format!("service {name} is {state}, last died: {cause}"),
        None => format!("service {name} is {state}"),
    }
}

/// Processor, memory and data partition.
fn loads(snapshot: &Snapshot) -> String {
    let Some(metrics) = &snapshot.metrics else { return "load not measured yet".to_owned() };
    let percent = |used: u64, total: u64| (used.saturating_mul(100)).checked_div(total);
    let cpu = metrics.cpu.last().map(|cpu| format!("CPU {cpu} %"));
    let memory = percent(metrics.memory_used, metrics.memory_total);
    let data = percent(metrics.data_used, metrics.data_total);
    let memory = memory.map(|percent| format!("memory {percent} %"));
    let data = data.map(|percent| format!("data {percent} %"));
    [cpu, memory, data].into_iter().flatten().collect::<Vec<_>>().join(", ")
}
