//! The cursor of the Services page.

use super::*;

/// The row under the cursor, if there is one.
fn chosen(view: &View, snapshot: &Snapshot) -> Option<String> {
    let backend = draw(80, 40, |buffer| render(snapshot, view, buffer));
    let reversed = |cell: &&Cell| cell.modifier.contains(ratatui::style::Modifier::REVERSED);
    let cells = backend.buffer().content().iter().filter(reversed);
    let row: String = cells.map(Cell::symbol).collect();
    let word = |word: &&str| word.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    row.split_whitespace().find(word).map(str::to_owned)
}

fn after(keys: &[Key], snapshot: &Snapshot) -> (View, Option<String>) {
    let mut view = view(Page::Services, 80, 40);
    for key in keys {
        assert_eq!(view.key(*key, snapshot), None);
    }
    let chosen = chosen(&view, snapshot);
    (view, chosen)
}

#[test]
fn the_first_key_goes_where_it_says() {
    let snapshot = samples::ordinary();
    let first = |key| after(&[key], &snapshot).1;
    assert_eq!(first(Key::Home).as_deref(), Some("root"));
    assert_eq!(first(Key::Down).as_deref(), Some("root"));
    assert_eq!(first(Key::End).as_deref(), Some("storage"));
    assert_eq!(first(Key::Up).as_deref(), Some("storage"));
    assert_eq!(after(&[Key::Down, Key::Esc, Key::Home], &snapshot).1.as_deref(), Some("root"));
}

#[test]
fn what_acts_on_a_service_first_shows_on_which() {
    let snapshot = samples::ordinary();
    for key in [Key::Enter, Key::Char(' '), Key::Char('L')] {
        let (view, chosen) = after(&[key], &snapshot);
        assert_eq!((view.page(), chosen.as_deref()), (Page::Services, Some("root")), "{key:?}");
    }
    assert_eq!(after(&[Key::Enter, Key::Char('L')], &snapshot).0.page(), Page::Logs);
}

#[test]
fn a_cursor_whose_service_is_folded_away_is_on_what_hides_it() {
    let mut snapshot = samples::ordinary();
    let promoter = snapshot.services.iter().position(|service| service.name == "promoter").unwrap();
    snapshot.services[promoter].restarts = 1;
    let mut view = view(Page::Services, 80, 40);
    for _ in 0..50 {
        if chosen(&view, &snapshot).as_deref() == Some("promoter") {
            break;
        }
        view.key(Key::Down, &snapshot);
    }
    assert_eq!(chosen(&view, &snapshot).as_deref(), Some("promoter"));
    // Another boot, on which it never died.
    snapshot.services[promoter].restarts = 0;
    assert_eq!(chosen(&view, &snapshot).as_deref(), Some("consensus"));
    view.key(Key::Down, &snapshot);
    assert_eq!(chosen(&view, &snapshot).as_deref(), Some("console"));
}
