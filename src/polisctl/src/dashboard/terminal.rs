//! The terminal of the dashboard: its keys, and when the cluster is looked at again.

use std::time::Duration;

use polis_base::canvas::{Canvas, Colours};
use polis_tui::Key;
use tokio::time::sleep;

use super::board::Board;
use super::poll::poll;
use crate::error::Error;
use crate::screen::{Input, Screen, write};
use crate::session::{Session, Target};

/// Between two looks at the cluster.
const PACE: Duration = Duration::from_secs(2);
/// Nodes that `PgUp` and `PgDn` pass: about a screen of 24 rows, with some of them for notes.
const PAGE: usize = 10;

/// The command of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Nothing,
    Leave,
    Open,
}

/// Applies a key to the selection.
fn press(key: Key, selected: &mut usize, count: usize) -> Action {
    let last = count.saturating_sub(1);
    match key {
        Key::Up | Key::Char('k') => *selected = selected.saturating_sub(1),
        Key::Down | Key::Char('j') => *selected = (*selected + 1).min(last),
        Key::PageUp => *selected = selected.saturating_sub(PAGE),
        Key::PageDown => *selected = (*selected + PAGE).min(last),
        Key::Home => *selected = 0,
        Key::End => *selected = last,
        Key::Enter => return Action::Open,
        Key::Char('q') | Key::Ctrl('c') => return Action::Leave,
        _ => {}
    }
    Action::Nothing
}

/// This terminal, while the dashboard is on it.
pub(super) struct Terminal {
    screen: Screen,
    canvas: Canvas,
    colours: Colours,
}

impl Terminal {
    pub(super) fn open(colours: Colours) -> Result<Self, Error> {
        let screen = Screen::open()?;
        Ok(Self { canvas: Canvas::whole(screen.size(), colours), screen, colours })
    }

    /// Draws and reads keys; returns the node whose console is wanted, if one is.
    pub(super) async fn drive(
        &mut self,
        session: &Session,
        board: &mut Board,
        selected: &mut usize,
    ) -> Result<Option<Target>, Error> {
        let mut next = Box::pin(newer(session, board.clone()));
        loop {
            *selected = (*selected).min(board.cards.len().saturating_sub(1));
            write(&self.canvas.draw(|buffer| board.draw(*selected, buffer)))?;
            let input = tokio::select! {
                // Cancel-safe per its documentation.
                input = self.screen.input() => input?,
                // Cancel-safe: the look is kept, and goes on behind the keys.
                looked = &mut next => {
                    match looked {
                        Ok(looked) => *selected = board.renew(looked, *selected),
                        Err(error) => board.trouble = Some(error.summary()),
                    }
                    next = Box::pin(newer(session, board.clone()));
                    continue;
                }
            };
            let keys = match input {
                Input::Leave => return Ok(None),
                Input::Keys(keys) => keys,
                Input::Redraw => {
                    self.canvas = Canvas::whole(self.screen.size(), self.colours);
                    continue;
                }
            };
            if !keys.is_empty() {
                board.notice = None;
            }
            for key in keys {
                match press(key, selected, board.cards.len()) {
                    Action::Nothing => {}
                    Action::Leave => return Ok(None),
                    Action::Open => {
                        if let Some(target) = board.open(*selected) {
                            return Ok(Some(target));
                        }
                    }
                }
            }
        }
    }
}

/// The cluster at the next look, which begins after a pause.
async fn newer(session: &Session, last: Board) -> Result<Board, Error> {
    sleep(PACE).await;
    Box::pin(poll(session, &last)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_choose_a_node_and_open_it() {
        let mut selected = 0;
        assert_eq!(press(Key::Up, &mut selected, 3), Action::Nothing);
        assert_eq!(selected, 0);
        for _ in 0..5 {
            assert_eq!(press(Key::Down, &mut selected, 3), Action::Nothing);
        }
        assert_eq!(selected, 2);
        assert_eq!(press(Key::Enter, &mut selected, 3), Action::Open);
        assert_eq!(press(Key::Char('q'), &mut selected, 3), Action::Leave);
        for (key, place) in [(Key::PageDown, 12), (Key::PageDown, 22), (Key::PageUp, 12)] {
            assert_eq!(press(key, &mut selected, 300), Action::Nothing);
            assert_eq!(selected, place);
        }
        assert_eq!(press(Key::PageDown, &mut selected, 15), Action::Nothing);
        assert_eq!(selected, 14, "the last node");
        assert_eq!(press(Key::Down, &mut selected, 0), Action::Nothing);
        assert_eq!(selected, 0, "an empty cluster");
    }
}
