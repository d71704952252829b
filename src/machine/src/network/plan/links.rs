//! The link of each part of the configuration, and the bonds and VLANs that are to be made.
//!
//! ```text
//! configuration, cards --> Layout --> actions: bonds and VLANs of others go, missing ones are
//!                            |                 made, cards leave and join bonds
//!                            +------> settings, by link
//!                            +------> faults: parts without exactly one link
//! ```
//!
//! A link that an action makes has no index yet: the caller applies the actions, observes, and
//! plans again, until no action is left.
//!
//! Invariants:
//! - A card is selected by exactly one part of the configuration, or not at all.
//! - After the actions were applied often enough, there are none (`links_are_made_in_rounds`).
//!
//! What this module does not do: addresses and routes (`plan`).

use std::collections::{BTreeMap, BTreeSet};

use super::{Action, Kind, Link, Observed};
use crate::parameters::{self, Bond, Card, LinkSettings, Mac, Match, Parent};

/// The parts of the configuration as links.
#[derive(Debug, Default)]
pub(in super::super) struct Layout<'a> {
    /// The links that are there with their settings: the primary one first, then in the order of
    /// interfaces, bonds and VLANs.
    pub(in super::super) settings: Vec<(u32, &'a LinkSettings)>,
    /// Cards that are to be in a bond, and are not yet.
    pub(in super::super) joining: BTreeSet<u32>,
    /// The next actions.
    pub(in super::super) actions: Vec<Action>,
    /// Why a part has no link.
    pub(in super::super) faults: Vec<String>,
    /// The name or the address that selected each card.
    used: BTreeMap<u32, String>,
    /// The bonds and VLANs that stay.
    kept: BTreeSet<u32>,
}

impl<'a> Layout<'a> {
    /// The configuration on the links that are there.
    pub(in super::super) fn of(observed: &Observed, config: &'a parameters::Network) -> Self {
        let mut layout = Self::default();
        for interface in &config.interfaces {
            let card =
                layout.take(observed, &interface.card, &format!("interface {}", interface.card));
            layout.settings.extend(card.map(|index| (index, &interface.settings)));
        }
        for bond in &config.bonds {
            layout.bond(observed, bond);
        }
        for vlan in &config.vlans {
            layout.vlan(observed, vlan);
        }
        layout.settings.sort_by_key(|(_, settings)| !settings.primary);
        layout.remove(observed);
        layout
    }

    /// The card, if it is there and nothing else uses it.
    fn take(&mut self, observed: &Observed, card: &Card, by: &str) -> Option<u32> {
        let index = self.find(observed, card, by)?;
        if let Some(other) = self.used.get(&index) {
            let name = observed.links.get(&index).map_or("a card", |link| link.name.as_str());
            self.faults.push(format!("{by} selects {name}, which {other} selects, too"));
            return None;
        }
        self.used.insert(index, by.to_owned());
        Some(index)
    }

    /// The one card that fits.
    fn find(&mut self, observed: &Observed, card: &Card, by: &str) -> Option<u32> {
        let fit = observed.links.iter().filter(|(_, link)| {
            link.kind == Kind::Ethernet
                && card.fits(&link.name, link.hardware, &link.place, link.driver.as_deref())
        });
        let fit: Vec<(u32, &Link)> = fit.map(|(index, link)| (*index, link)).collect();
        if let [(index, _)] = *fit {
            return Some(index);
        }
        let fault = match &*fit {
            [] => format!("{by} selects no card: there is {}", inventory(observed)),
            several => {
                let several: Vec<_> = several.iter().map(|(_, link)| described(link)).collect();
                format!("{by} selects several cards: {}; it has to be one", several.join(", "))
            }
        };
        self.faults.push(fault);
        None
    }

    fn bond(&mut self, observed: &Observed, bond: &'a Bond) {
        let by = format!("bond {}", bond.name);
        let members: Vec<u32> =
            bond.members.iter().filter_map(|card| self.take(observed, card, &by)).collect();
        let there = observed.links.iter().find(|(_, link)| link.name == bond.name);
        let index = match there {
            Some((index, link)) if link.kind == Kind::Bond(Some(bond.mode)) => *index,
            Some((_, link)) if matches!(link.kind, Kind::Bond(_)) => {
                // Its mode changes only while it has no members: another one is as quick.
                self.joining.extend(members);
                return;
            }
            Some(_) | None => {
                let address = hardware_address(observed, bond);
                self.actions.push(Action::AddBond(bond.name.clone(), bond.mode, address));
                self.joining.extend(members);
                return;
            }
        };
        self.kept.insert(index);
        self.settings.push((index, &bond.settings));
        for link in members {
            let master = observed.links.get(&link).and_then(|link| link.master);
            if master == Some(index) {
                continue;
            }
            self.joining.insert(link);
            self.actions.extend(master.map(|_other| Action::Leave(link)));
            self.actions.push(Action::Join { link, bond: index });
        }
    }

    fn vlan(&mut self, observed: &Observed, vlan: &'a parameters::Vlan) {
        let by = format!("VLAN {} on {}", vlan.id, vlan.parent);
        let parent = match &vlan.parent {
            Parent::Card(card) => match self.find(observed, card, &by) {
                Some(index) if self.used.get(&index).is_some_and(|by| by.starts_with("bond ")) => {
                    let fault = format!("{by} is on a card of a bond: put it on the bond");
                    self.faults.push(fault);
                    None
                }
                found => found,
            },
            Parent::Bond(name) => {
                let bond = observed
                    .links
                    .iter()
                    .find(|(index, link)| link.name == *name && self.kept.contains(index));
                bond.map(|(index, _)| *index)
            }
        };
        let Some(parent) = parent else { return };
        let kind = Kind::Vlan { parent, id: vlan.id };
        match observed.links.iter().find(|(_, link)| link.kind == kind) {
            Some((index, _)) if self.kept.insert(*index) => {
                self.settings.push((*index, &vlan.settings));
            }
            Some(_) => self.faults.push(format!("{by} is there twice")),
            None => {
                let parent_name = observed.links.get(&parent).map(|link| link.name.as_str());
                let name = format!("{}.{}", parent_name.unwrap_or_default(), vlan.id);
                self.actions.push(Action::AddVlan { name, parent, id: vlan.id });
            }
        }
    }

    /// Removes bonds and VLANs that the configuration does not have, and frees cards that are in
    /// no bond of it: before anything is made, which may need their names or cards.
    fn remove(&mut self, observed: &Observed) {
        let mut removed = Vec::new();
        for (index, link) in &observed.links {
            let made = matches!(link.kind, Kind::Bond(_) | Kind::Vlan { .. });
            if made && !self.kept.contains(index) {
                removed.push(*index);
            }
        }
        let gone = |index: Option<u32>| index.is_some_and(|index| removed.contains(&index));
        let mut actions = Vec::new();
        for (index, link) in &observed.links {
            match link.kind {
                Kind::Vlan { parent, .. } if removed.contains(index) && !gone(Some(parent)) => {
                    actions.push(Action::RemoveLink(*index));
                }
                Kind::Bond(_) if removed.contains(index) => {
                    actions.push(Action::RemoveLink(*index));
                }
                Kind::Ethernet if link.master.is_some() && !gone(link.master) => {
                    let by = self.used.get(index);
                    if !by.is_some_and(|by| by.starts_with("bond ")) {
                        actions.push(Action::Leave(*index));
                    }
                }
                Kind::Ethernet | Kind::Vlan { .. } | Kind::Bond(_) | Kind::Loopback => {}
            }
        }
        if actions.iter().any(|action| matches!(action, Action::RemoveLink(_))) {
            // A part that takes their names or cards comes in the next round.
            self.actions = actions;
        } else {
            actions.append(&mut self.actions);
            self.actions = actions;
        }
    }
}

/// That of the first member, so that a bond has the same at each boot, whichever card appears
/// first; `None` where that card is selected by something else and not there yet.
fn hardware_address(observed: &Observed, bond: &Bond) -> Option<Mac> {
    let first = bond.members.first()?;
    if let Some(Match::Mac(mac)) = &first.matches {
        return Some(*mac);
    }
    let mut cards = observed.links.values().filter(|link| link.kind == Kind::Ethernet);
    let fits =
        |link: &&Link| first.fits(&link.name, link.hardware, &link.place, link.driver.as_deref());
    cards.find(fits).map(|link| link.hardware)
}

/// The cards of the machine, in words.
fn inventory(observed: &Observed) -> String {
    let cards = observed.links.values().filter(|link| link.kind == Kind::Ethernet);
    let cards: Vec<String> = cards.map(described).collect();
    if cards.is_empty() { "no card".to_owned() } else { cards.join(", ") }
}

/// A card with everything that selects it.
fn described(link: &Link) -> String {
    let place = (!link.place.is_empty()).then(|| format!("path {}", link.place));
    let driver = link.driver.as_ref().map(|driver| format!("driver {driver}"));
    let parts = [Some(link.hardware.to_string()), driver, place];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    format!("{} ({})", link.name, parts.join(", "))
}

#[cfg(test)]
#[path = "links_tests.rs"]
mod tests;
