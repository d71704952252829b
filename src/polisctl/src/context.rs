//! `polisctl context`: the contexts, and the current one.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::ask::{Go, Sure};
use super::contexts::{self, Context};
use super::error::Error;
use super::output::{Document, fields, or_dash};
use super::table::table;
use super::{Global, key, units};
use polis_wire::endpoint::Endpoint;
use polis_wire::identity::Fingerprint;
use polis_wire::pki::Facts;

/// Commands about contexts.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Command {
    /// List the contexts; a star marks the current one.
    List,
    /// Set the current context.
    Use {
        /// Its name.
        #[arg(value_parser = contexts::name)]
        name: String,
    },
    /// Print a context [default: the current one].
    Show {
        /// Its name.
        #[arg(value_parser = contexts::name)]
        name: Option<String>,
    },
    /// Make a context, or change its endpoints, detours or key.
    Set {
        /// Its name.
        #[arg(value_parser = contexts::name)]
        name: String,
        /// The private key of its user.
        #[arg(long, value_name = "FILE")]
        key: Option<PathBuf>,
        /// Another way to an address of the cluster, such as a forwarded port; repeatable.
        #[arg(long, value_name = "HOST:PORT=HOST:PORT")]
        via: Vec<String>,
        /// Remove the detour for an address of the cluster; repeatable.
        #[arg(long, value_name = "HOST:PORT")]
        remove_via: Vec<String>,
    },
    /// Make a context from a file that the owner wrote with `user create`.
    Import {
        /// The file.
        file: PathBuf,
        /// The private key of which the owner has the public half.
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
    },
    /// Remove a context; its key stays.
    Remove {
        /// Its name.
        #[arg(value_parser = contexts::name)]
        name: String,
        #[command(flatten)]
        sure: Sure,
    },
}

#[derive(Debug, Serialize)]
struct View {
    name: String,
    current: bool,
    user: String,
    endpoints: Vec<String>,
    key: PathBuf,
    /// Detours: the address of the cluster, and where it is reached.
    via: BTreeMap<String, String>,
    ca_fingerprint: Option<String>,
    certificate_ends: Option<units::Time>,
}

/// No address has this port: with it as the default, one has to be given.
const NO_PORT: u16 = 0;

/// Runs the command.
pub(super) fn run(command: Command, global: &Global) -> Result<(), Error> {
    let contexts = &global.contexts;
    let current = contexts.current()?;
    match command {
        Command::List => {
            let mut views = Vec::new();
            for name in contexts.names()? {
                // A damaged context must not hide the others.
                match contexts.load(&name) {
                    Ok(context) => views.push(view(&context, current.as_deref())),
                    Err(error) => global.out.remark(error.render().trim_end()),
                }
            }
            let rows: Vec<Vec<String>> = views.iter().map(row).collect();
            let text = table(&["", "NAME", "USER", "ENDPOINTS", "CERTIFICATE ENDS"], &rows);
            global.out.print(&Document::new(&views, text)?)
        }
        Command::Show { name } => {
            let named = contexts.context(name.as_deref().or(global.context.as_deref()))?;
            let context = named.ok_or_else(contexts::no_context)?;
            let view = view(&context, current.as_deref());
            let detours: Vec<_> =
                view.via.iter().map(|(from, to)| format!("{from} by {to}")).collect();
            let lines = [
                ("name", view.name.clone()),
                ("user", or_dash(&view.user)),
                ("endpoints", or_dash(&view.endpoints.join("\n"))),
                ("detours", or_dash(&detours.join("\n"))),
                ("key", or_dash(&view.key.display().to_string())),
                ("CA", or_dash(view.ca_fingerprint.as_deref().unwrap_or_default())),
                ("certificate ends", or_dash(&units::text(view.certificate_ends))),
            ];
            global.out.print(&Document::new(&view, fields(&lines))?)
        }
        Command::Use { name } => {
            contexts.load(&name)?;
            contexts.set_current(&name)?;
            let value = serde_json::json!({ "current": name });
            global.out.print(&Document::new(&value, format!("using {name}"))?)
        }
        Command::Set { name, key, via, remove_via } => {
            let mut context = contexts.find_context(&name)?.unwrap_or_else(|| Context::new(&name));
            change(&mut context, key, &via, &remove_via, global)?;
            contexts.save(&context)?;
            if current.is_none() {
                contexts.set_current(&name)?;
            }
            let value = serde_json::json!({ "name": name });
            global.out.print(&Document::new(&value, format!("{name} is saved"))?)
        }
        Command::Import { file, key } => super::user::import(&file, &key, global),
        Command::Remove { name, sure } => {
            contexts.must_exist(&name)?;
            let effect = format!(
                "The context {name} is forgotten, with its certificate and the CA that it trusts; \
                 the key stays."
            );
            if sure.of(global, &effect)? == Go::NoFurther {
                return Ok(());
            }
            contexts.remove(&name)?;
            let value = serde_json::json!({ "removed": name });
            global.out.print(&Document::new(&value, format!("{name} is removed"))?)
        }
    }
}

/// Changes what is named of a context.
fn change(
    context: &mut Context,
    key: Option<PathBuf>,
    via: &[String],
    remove_via: &[String],
    global: &Global,
) -> Result<(), Error> {
    let (name, settings) = (&context.name, &mut context.settings);
    if !global.endpoints.is_empty() {
        settings.endpoints = global.endpoints.iter().map(ToString::to_string).collect();
    }
    if let Some(file) = key {
        key::check(&file)?;
        settings.key = std::path::absolute(file)?;
    }
    for address in remove_via {
        if settings.via.remove(address).is_none() {
            return Err(Error::new(format!("context {name} has no detour for {address}"))
                .or_help(format!("its detours: `polisctl context show {name}`")));
        }
    }
    settings.via.extend(detours(via)?);
    Ok(())
}

/// Reads the values of `--via`. Both sides have a port: a detour is for one service of a machine.
fn detours(texts: &[String]) -> Result<BTreeMap<String, String>, Error> {
    if let Some(text) = texts.iter().find(|text| !text.contains('=')) {
        return Err(Error::usage(format!("--via {text:?} is not HOST:PORT=HOST:PORT"))
            .or_help("write the address of the cluster, `=`, and where it is reached"));
    }
    let pairs = super::parameters::pairs("--via", texts)?;
    let address = |text: &str| {
        Endpoint::parse(text, NO_PORT).map(|read| read.to_string()).map_err(|_invalid| {
            Error::usage(format!("--via: {text:?} is not HOST:PORT, [ADDRESS]:PORT for IPv6"))
                .or_help("write both sides with a port, as 10.0.2.15:7839=127.0.0.1:17839")
        })
    };
    pairs.iter().map(|(from, to)| Ok((address(from)?, address(to)?))).collect()
}

fn view(context: &Context, current: Option<&str>) -> View {
    let ends = context.certificate.as_deref().and_then(Facts::read);
    View {
        name: context.name.clone(),
        current: current == Some(&context.name),
        user: context.settings.user.clone(),
        endpoints: context.settings.endpoints.clone(),
        key: context.settings.key.clone(),
        via: context.settings.via.clone(),
        ca_fingerprint: context.ca.as_deref().map(|ca| Fingerprint::of_certificate(ca).to_string()),
        certificate_ends: ends.map(|facts| units::Time(facts.not_after)),
    }
}

fn row(view: &View) -> Vec<String> {
    vec![
        if view.current { "*" } else { "" }.to_owned(),
        view.name.clone(),
        or_dash(&view.user),
        or_dash(&view.endpoints.join(",")),
        or_dash(&units::text(view.certificate_ends)),
    ]
}

#[cfg(test)]
mod tests {
    use crate::loopback::Cluster;
    use crate::testing::World;

    #[test]
    fn the_detours_of_a_context_are_shown_and_removed() {
        let world = World::new();
        let via = ["--via", "192.0.2.1:7839=127.0.0.1:1", "--via", "192.0.2.2:7839=127.0.0.1:2"];
        world.runs(&[&["context", "set", "home"][..], &via].concat());
        let shown = world.runs(&["context", "show", "home"]);
        assert!(shown.contains("192.0.2.1:7839 by 127.0.0.1:1"), "{shown}");
        let remove = ["context", "set", "home", "--remove-via", "192.0.2.1:7839"];
        world.runs(&remove);
        let json = world.runs(&["context", "show", "home", "-o", "json"]);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["via"], serde_json::json!({ "192.0.2.2:7839": "127.0.0.1:2" }));
        let refused = world.refuses(&remove);
        assert!(refused.contains("no detour for 192.0.2.1:7839"), "{refused}");
    }

    #[test]
    fn only_a_context_that_is_there_is_removed_also_in_a_dry_run() {
        let world = World::new();
        world.runs(&["context", "set", "home"]);
        for more in ["--dry-run", "--yes"] {
            let refused = world.refuses(&["context", "remove", "hone", more]);
            assert!(refused.contains("there are: home"), "{refused}");
        }
        // One that cannot be read can be removed.
        std::fs::write(world.path("polis/contexts/home/context.json"), "noise").unwrap();
        world.runs(&["context", "remove", "home", "--yes"]);
        assert!(!world.path("polis/contexts/home").exists());
    }

    #[test]
    fn a_key_that_is_not_there_or_is_the_public_half_changes_no_context() {
        let world = World::new();
        world.runs(&["owner", "create", "-o", "@ann.key"]);
        for (key, said) in [("@none", "cannot read @none"), ("@ann.pub", "only the public half")] {
            let refused = world.refuses(&["context", "set", "home", "--key", key]);
            assert!(refused.contains(said), "{refused}");
        }
        assert_eq!(world.run(&["context", "show", "home"]).status, 1, "nothing was saved");
        world.runs(&["context", "set", "home", "--key", "@ann.key"]);
    }

    #[test]
    fn a_file_of_a_user_is_imported_with_the_private_half_alone() {
        let world = World::new();
        let _cluster = Cluster::new(&world);
        let public = world.runs(&["owner", "show", "@owner.key", "-o", "json"]);
        let public: serde_json::Value = serde_json::from_str(&public).unwrap();
        std::fs::write(world.path("half"), public["public_key"].as_str().unwrap()).unwrap();
        let create = ["user", "create", "ann", "--role", "viewer", "--key", "@half"];
        world.runs(&[&create[..], &["-o", "@ann.json"]].concat());
        let import = |key| ["--context", "ann", "context", "import", "@ann.json", "--key", key];
        let refused = world.refuses(&import("@half"));
        assert!(refused.contains("half has only the public half"), "{refused}");
        assert_eq!(world.run(&["context", "show", "ann"]).status, 1, "nothing was saved");
        world.runs(&import("@owner.key"));
    }

    #[test]
    fn a_detour_that_no_address_takes_is_wrong_usage() {
        let world = World::new();
        for (via, said) in [
            ("192.0.2.1=127.0.0.1:1", "\"192.0.2.1\" is not HOST:PORT"),
            ("192.0.2.1:7839=127.0.0.1", "\"127.0.0.1\" is not HOST:PORT"),
            ("192.0.2.1:7839=", "\"\" is not HOST:PORT"),
            ("192.0.2.1:99999=127.0.0.1:1", "99999"),
            ("192.0.2.1:7839", "is not HOST:PORT=HOST:PORT"),
        ] {
            let ended = world.run(&["context", "set", "home", "--via", via]);
            assert_eq!((ended.status, &*ended.stdout), (2, ""), "{via}: {}", ended.stderr);
            assert!(ended.stderr.contains(said), "{via}: {}", ended.stderr);
        }
        assert_eq!(world.run(&["context", "show", "home"]).status, 1, "nothing was saved");
        // As it is looked for.
        world.runs(&["context", "set", "home", "--via", "[fd00:0::1]:7839=[::1]:1"]);
        let shown = world.runs(&["context", "show", "home"]);
        assert!(shown.contains("[fd00:0::1]:7839 by [::1]:1"), "{shown}");
    }
}
