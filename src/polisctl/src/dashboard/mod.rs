//! `polisctl dashboard`: the whole cluster on one screen; Enter opens the console of a node.
//!
//! The records and the health of all nodes come from the leader, the rest from the snapshot
//! that each node draws its own console from.
//!
//! ```text
//! leader: nodes, health --+
//! each node: snapshot ----+--poll--> Board --draw--> /dev/tty <--keys-- a person
//! ```
//!
//! Invariants:
//! - A node that does not answer is shown with the reason, and never as healthy.
//! - Without a leader the headline says so and since when the records are old; each node
//!   of them is asked still.
//! - A text that is cut, and notes that are left out, say so.
//! - Every character of a text takes one cell: one that is wider would move the rest of its row.
//! - No more than a fixed number of nodes are asked at the same time.
//! - The chosen node stays chosen when the list of nodes changes.
//!
//! What this module does not do: compare the clocks of the nodes.

mod board;
mod card;
mod poll;
mod terminal;

use std::io::{self, IsTerminal as _};

use self::board::Board;
use self::poll::poll;
use self::terminal::Terminal;
use super::Global;
use super::console::attach;
use super::error::Error;
use super::screen::until_ended;
use super::session::{PATIENCE, Session};

/// Runs the command.
pub(super) async fn run(global: &Global) -> Result<(), Error> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(Error::new("the dashboard needs a terminal")
            .or_help("`polisctl cluster status` prints the state without one"));
    }
    until_ended(Box::pin(show(global))).await
}

async fn show(global: &Global) -> Result<(), Error> {
    let mut session = Session::prepare(global, PATIENCE)?;
    // An error of the first look is printed as plain text.
    let mut board = Box::pin(poll(&session, &Board::default())).await?;
    session.go_on();
    let mut selected = 0;
    loop {
        let chosen = {
            let mut terminal = Terminal::open(global.colours)?;
            Box::pin(terminal.drive(&session, &mut board, &mut selected)).await?
        };
        // The terminal is closed, and with it its screen: the console brings its own.
        let Some(target) = chosen else { return Ok(()) };
        if let Err(error) = Box::pin(attach(&mut session, &target, global.colours)).await {
            board.notice = Some(error.summary());
        }
    }
}
