//! Property tests: random keys, random snapshots, and random sizes of the terminal.

use proptest::prelude::*;

use super::*;
use crate::text;

/// Any key at all; those that mean something more often than chance would have them.
fn key() -> impl Strategy<Value = Key> {
    prop_oneof![
        2 => (0u8..14).prop_map(Key::F),
        2 => prop::sample::select("?slrhupoyqLSPRYUN/n-+= 123456789".chars().collect::<Vec<_>>())
            .prop_map(Key::Char),
        1 => any::<char>().prop_map(Key::Char),
        1 => prop::char::range('a', 'z').prop_map(Key::Ctrl),
        1 => any::<(u16, u16)>().prop_map(|(row, column)| Key::Cursor { row, column }),
        4 => prop::sample::select(vec![
            Key::Up,
            Key::Down,
            Key::Left,
            Key::Right,
            Key::PageUp,
            Key::PageDown,
            Key::Home,
            Key::End,
            Key::Insert,
            Key::Delete,
            Key::Tab,
            Key::BackTab,
            Key::Enter,
            Key::Backspace,
            Key::Esc,
        ]),
    ]
}

/// Closes everything that is open, and goes all the way to the end of a machine.
const CONFIRMED: &str = "\u{1b}PRY";

/// Keys that are pressed one after the other.
fn run(keys: &str) -> Vec<(Key, usize)> {
    let key = |key| if key == '\u{1b}' { Key::Esc } else { Key::Char(key) };
    keys.chars().map(|c| (key(c), 3)).collect()
}

/// Keys, of which some runs go all the way to the end of a machine.
fn keys() -> impl Strategy<Value = Vec<(Key, usize)>> {
    let any = prop::collection::vec((key(), 0..samples::all().len()), 0..12);
    (
        any,
        prop::option::weighted(0.2, prop::sample::select(vec![CONFIRMED, "Poy", "\u{1b}P", "L/x"])),
    )
        .prop_map(|(mut keys, last)| {
            keys.extend(last.into_iter().flat_map(run));
            keys
        })
}

/// Terminals: most of them small, where the trouble is.
fn size() -> impl Strategy<Value = (u16, u16)> {
    prop_oneof![4 => (1u16..40, 1u16..14), 2 => (1u16..160, 1u16..60), 1 => (1u16..=500, 1u16..=200)]
}

#[track_caller]
fn assert_glyphs_are_in_the_font(backend: &TestBackend) {
    for cell in backend.buffer().content() {
        assert_eq!(text::clean(cell.symbol()), cell.symbol());
        assert_eq!(cell.symbol().chars().count(), 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_key_and_no_size_of_terminal_panics(
        first in size(),
        then in size(),
        keys in keys(),
        leaves in any::<bool>(),
    ) {
        let snapshots = samples::all().map(|(_, snapshot)| snapshot);
        let mut view = View::new(first.0, first.1);
        if leaves {
            view = view.that_can_be_left();
        }
        let confirmed = keys.ends_with(&run(CONFIRMED));
        let mut end = None;
        for (key, snapshot) in keys {
            let command = view.key(key, &snapshots[snapshot]);
            if matches!(command, Some(Command::Reboot | Command::PowerOff)) {
                prop_assert!(matches!(key, Key::Char('y' | 'Y')), "{key:?} ends a machine");
                end = command;
            }
            let backend = draw(first.0, first.1, |buffer| render(&snapshots[snapshot], &view, buffer));
            assert_glyphs_are_in_the_font(&backend);
            // The host may learn of a new size late: drawing must not rely on it.
            draw(then.0, then.1, |buffer| render(&snapshots[snapshot], &view, buffer));
            view.was_read();
        }
        prop_assert!(!confirmed || end == Some(Command::Reboot), "nothing came of a confirmation");
    }

    #[test]
    fn a_guru_can_be_read_at_any_size(
        size in size(),
        keys in prop::collection::vec(key(), 0..8),
        guru in prop::sample::select(vec![
            samples::guru(),
            samples::guru_locked(),
            samples::guru_overflowing(),
            samples::guru_wide(),
            Guru::default(),
        ]),
        phase in any::<bool>(),
    ) {
        let mut view = guru::View::new(size.0, size.1);
        for key in keys {
            view.key(key, &guru);
        }
        let backend = draw(size.0, size.1, |buffer| guru::render(&guru, &view, phase, buffer));
        assert_glyphs_are_in_the_font(&backend);
    }
}

/// Where chance seldom goes: the edges of what is allowed, and of what changes the layout.
const EDGES: [(u16, u16); 14] = [
    (1, 1),
    (1, 200),
    (500, 1),
    (2, 7),
    (19, 7),
    (20, 8),
    (43, 15),
    (44, 16),
    (79, 23),
    (81, 25),
    (109, 28),
    (133, 60),
    (240, 80),
    (500, 200),
];

#[test]
fn every_page_of_every_sample_and_what_lies_over_it_is_drawn_at_every_edge() {
    let samples = samples::all();
    for (columns, rows) in EDGES {
        for (page, over) in Page::ALL.into_iter().zip([Key::Char('?'), Key::F(10)].iter().cycle()) {
            for (_, snapshot) in &samples {
                let mut view = view(page, columns, rows);
                view.key(Key::End, snapshot);
                draw(columns, rows, |buffer| render(snapshot, &view, buffer));
                view.key(*over, snapshot);
                let shown = draw(columns, rows, |buffer| render(snapshot, &view, buffer));
                // As many cells as on a whole screen are enough to look at.
                if columns < 500 {
                    assert_glyphs_are_in_the_font(&shown);
                }
            }
        }
    }
}
