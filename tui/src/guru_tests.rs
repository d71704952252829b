//! The guru meditation: what is on its screen, its keys, and its prompt for a recovery key.

use super::*;

#[test]
fn the_code_all_keys_and_what_comes_without_one_are_on_a_screen_of_any_use() {
    let unlock = Guru { unlock: true, ..samples::guru() };
    let wide = Guru { unlock: true, ..samples::guru_wide() };
    for guru in [&unlock, &wide, &samples::guru_overflowing()] {
        for (columns, rows) in GURU_SIZES {
            let shown = guru_screen(guru, &guru::View::new(columns, rows), columns, rows);
            let counts = matches!(guru.countdown, Countdown::Reboot { .. });
            let keys = ["R reboot", "P power off", "L all"].into_iter();
            let keys = keys.chain(counts.then_some("H hold"));
            let keys = keys.chain(guru.unlock.then_some("U unlock"));
            let wait = if counts { " in 42 s" } else { "until a key is pressed" };
            for needed in keys.chain([guru.code.as_str(), wait, "What to do"]) {
                assert!(shown.contains(needed), "{needed:?} is not on {columns} x {rows}\n{shown}");
            }
        }
    }
}

#[test]
fn a_guru_of_which_nothing_is_known_has_whole_sentences() {
    for (columns, rows) in GURU_SIZES {
        let shown = guru_screen(&Guru::default(), &guru::View::new(columns, rows), columns, rows);
        for hole in ["\"\"", "Polis ,", "image  ", " 0 of 0"] {
            assert!(!shown.contains(hole), "{hole:?} in\n{shown}");
        }
        assert!(shown.contains("stopped."), "{shown}");
    }
}

#[test]
fn a_stage_without_room_for_its_name_is_cut_within_a_whole_sentence() {
    let guru = samples::guru_wide();
    for (columns, rows) in GURU_SIZES {
        let shown = guru_screen(&guru, &guru::View::new(columns, rows), columns, rows);
        assert!(shown.contains("\" failed."), "{columns} x {rows}\n{shown}");
    }
}

#[test]
fn no_letter_of_a_guru_is_dark_red_and_what_to_do_stands_out_on_a_photograph() {
    use ratatui::style::{Color, Modifier};
    for guru in [samples::guru(), samples::guru_locked(), samples::guru_overflowing()] {
        let view = guru::View::new(80, 24);
        let shown = draw(80, 24, |buffer| guru::render(&guru, &view, true, buffer));
        let cells = &shown.buffer().content;
        let letter = |cell: &&Cell| cell.symbol().chars().all(char::is_alphanumeric);
        assert!(cells.iter().filter(letter).all(|cell| cell.fg != Color::Red));
        let at = cells.iter().position(|cell| cell.symbol() == "►").unwrap();
        let next = &cells[at + 2];
        assert!(next.fg == Color::White && next.modifier.contains(Modifier::BOLD), "{next:?}");
    }
}

#[test]
fn a_guru_without_a_next_step_still_says_what_to_do() {
    let shown = guru_screen(&Guru::default(), &guru::View::new(80, 24), 80, 24);
    assert!(shown.contains("► Reboot."), "{shown}");
}

#[test]
fn a_guru_that_holds_says_why() {
    let foot = |countdown| {
        let guru = Guru { countdown, ..samples::guru() };
        guru_screen(&guru, &guru::View::new(80, 24), 80, 24)
    };
    let asked = "on request";
    assert!(foot(Countdown::Held).contains(asked));
    let uncounted = foot(Countdown::Uncounted);
    assert!(uncounted.contains("failed boots cannot be counted"), "{uncounted}");
    assert!(!uncounted.contains(asked) && !uncounted.contains("failed boot 2"), "{uncounted}");
    assert!(!foot(Countdown::Exhausted).contains(asked));
}

#[test]
fn only_the_border_of_a_guru_blinks() {
    let of = |phase| {
        let view = guru::View::new(80, 24);
        draw(80, 24, |buffer| guru::render(&samples::guru(), &view, phase, buffer)).buffer().clone()
    };
    let (on, off): (Buffer, Buffer) = (of(true), of(false));
    for (x, y) in (0..80).flat_map(|x| (0..24).map(move |y| (x, y))) {
        let border = !(2..78).contains(&x) || !(1..23).contains(&y);
        assert_eq!(border, on[(x, y)] != off[(x, y)], "at {x}, {y}");
    }
}

#[test]
fn a_guru_s_keys_are_commands() {
    let guru = samples::guru();
    let mut view = guru::View::new(80, 24);
    assert_eq!(view.key(Key::Char('r'), &guru), Some(Command::Reboot));
    assert_eq!(view.key(Key::Char('P'), &guru), Some(Command::PowerOff));
    assert_eq!(view.key(Key::Char('h'), &guru), Some(Command::Hold));
    assert_eq!(view.key(Key::Ctrl('l'), &guru), Some(Command::Redraw));
    assert_eq!(view.key(Key::Char('x'), &guru), None);
}

#[test]
fn a_prompt_and_what_was_typed_are_whole_on_a_screen_of_any_use() {
    let guru = samples::guru_locked();
    let typed = "MYKT-F9X7-".repeat(6);
    for (columns, rows) in GURU_SIZES {
        let mut view = guru::View::new(columns, rows);
        view.key(Key::Char('u'), &guru);
        for c in typed.chars() {
            view.key(Key::Char(c), &guru);
        }
        let shown = guru_screen(&guru, &view, columns, rows);
        let text = |gap: &str| {
            let rows = shown.lines().map(|row| row.trim_matches(|c: char| "\"█ ".contains(c)));
            rows.collect::<Vec<_>>().join(gap)
        };
        let asked = "recovery key of this machine; dashes and spaces do not matter.";
        for needed in [asked, "Enter opens the disk", "Esc goes back"] {
            assert!(text(" ").contains(needed), "{needed:?} is not on {columns} x {rows}\n{shown}");
        }
        assert!(text("").contains(&format!("{typed}_")), "{columns} x {rows}\n{shown}");
    }
}

#[test]
fn a_screen_that_takes_letters_for_a_recovery_key_names_none_as_a_key() {
    let guru = Guru { unlock: true, ..samples::guru_overflowing() };
    let mut named = 0;
    for (columns, rows) in GURU_SIZES {
        let mut view = guru::View::new(columns, rows);
        view.key(Key::Char('u'), &guru);
        let shown = guru_screen(&guru, &view, columns, rows);
        assert!(!shown.contains("press L"), "{columns} x {rows}\n{shown}");
        named += shown.matches(".. press Esc, then L for all ").count();
    }
    assert!(named > 0, "no screen is too small for the report");
}

#[test]
fn a_command_over_the_network_is_whole_or_the_screen_names_the_key_that_shows_it() {
    let guru = samples::guru_in_maintenance();
    let command = guru.maintenance.replace(' ', "");
    let mut cut = 0;
    let sizes = (30..=60).flat_map(|columns| (20..=41).map(move |rows| (columns, rows)));
    for (columns, rows) in sizes {
        let shown = guru_screen(&guru, &guru::View::new(columns, rows), columns, rows);
        let text: String = shown.chars().filter(|c| !"\"█ \n".contains(*c)).collect();
        if text.contains("Overthenetwork") && !text.contains(&command) {
            assert!(shown.contains("press L for all"), "{columns} x {rows}\n{shown}");
            cut += 1;
        }
    }
    assert!(cut > 0, "no screen is too small for it");
}

#[test]
fn escape_leaves_the_prompt_and_nothing_is_asked_for_without_a_lock() {
    let guru = samples::guru_locked();
    let mut view = guru::View::new(80, 24);
    assert!(guru_screen(&guru, &view, 80, 24).contains("U unlock"));
    view.key(Key::Char('U'), &guru);
    assert_eq!(view.key(Key::Enter, &guru), None, "an empty key opens nothing");
    view.key(Key::Char('A'), &guru);
    view.key(Key::Esc, &guru);
    assert!(view.take_typed().is_none());
    assert_eq!(view.key(Key::Char('p'), &guru), Some(Command::PowerOff));
    assert_eq!(view.key(Key::Char('u'), &samples::guru()), None);
    assert!(!guru_screen(&samples::guru(), &view, 80, 24).contains("unlock"));
}

#[test]
fn a_key_that_is_too_long_shows_its_end_on_every_screen() {
    let guru = samples::guru_locked();
    for (columns, rows) in [(1, 1), (12, 4), (80, 24)] {
        let mut view = guru::View::new(columns, rows);
        view.key(Key::Char('u'), &guru);
        for _ in 0..500 {
            view.key(Key::Char('A'), &guru);
        }
        view.key(Key::Char('Z'), &guru);
        guru_screen(&guru, &view, columns, rows);
        assert_eq!(view.take_typed().unwrap().len(), 200);
    }
}
