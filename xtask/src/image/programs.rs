//! The programs of this workspace: how cargo builds them for each kind of image.

use std::{
    env,
    ffi::OsStr,
    io::{self, BufRead as _, BufReader, IsTerminal as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use anyhow::{Context as _, Result};
use polis_image::{Kind, Observer as _, Report};
use serde::Deserialize;

use crate::{host, progress::Terminal};

/// Cargo's target folder below the workspace, with a folder for each profile.
const TARGET: &str = "target/x86_64-unknown-linux-gnu";
/// The programs of an image.
pub(super) const PROGRAMS: &[&str] = &["init", "node"];
/// The operator's program.
pub(super) const POLISCTL: &str = "polisctl";
/// The programs in the container images of the system, which images with workloads have.
pub(super) const SYSTEM_IMAGES: &[&str] = &["demo", "pause"];
/// The feature for fault injection and workload generators on the kernel command line. The
/// product is built without it.
const FAULTS: &str = "polis-node/fault-injection";
/// The other features that tests want. The programs of the development image have them
/// too, and so has this program (`.cargo/config.toml`): cargo would otherwise compile
/// most dependencies twice, once for these programs and once for the tests.
const TESTING: &str = "polis-runtime/testing,polis-wire/testing";

/// Whether this process has built [`POLISCTL`] together with the development image.
pub(super) static POLISCTL_BUILT: AtomicBool = AtomicBool::new(false);

/// Cargo as this workspace sets it up: the caller's environment neither moves the programs
/// nor replaces the flags that make them static.
pub(crate) fn cargo(workspace: &Path) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace).env("CARGO_TARGET_DIR", workspace.join("target"));
    for name in ["CARGO_BUILD_TARGET", "CARGO_ENCODED_RUSTFLAGS", "RUSTFLAGS"] {
        command.env_remove(name);
    }
    for (name, _) in env::vars_os().filter(|(name, _)| of_this_package(name)) {
        command.env_remove(name);
    }
    command
}

/// Whether cargo has set this variable to describe the running package. The build script of
/// `ring` runs again when one of them changes, and then most of the workspace is compiled
/// again: once for this program, once for what it builds.
fn of_this_package(variable: &OsStr) -> bool {
    let variable = variable.to_string_lossy();
    variable.starts_with("CARGO_PKG_") || variable.starts_with("CARGO_MANIFEST_")
}

/// Builds the programs of an image of this kind, in one run of cargo.
pub(super) fn cargo_build(kind: Kind, programs: &[&str]) -> Result<()> {
    let start = Instant::now();
    let why = why(&build_programs(kind, programs)?);
    Terminal::default().step(&Report { name: "cargo", time: start.elapsed(), why });
    Ok(())
}

/// The path of `polisctl`; it is built unless it came with the image.
pub(crate) fn polisctl() -> Result<PathBuf> {
    if !POLISCTL_BUILT.swap(true, Ordering::Relaxed) {
        host::require(&[host::BUILD])?;
        build_programs(Kind::Development, &[POLISCTL])?;
    }
    Ok(programs(Kind::Development).join(POLISCTL))
}

/// Builds the program that measures a curator from the same library, and returns its path.
pub(crate) fn curator_load() -> Result<PathBuf> {
    host::require(&[host::BUILD])?;
    build_programs(Kind::Product, &["curator-load"])?;
    Ok(programs(Kind::Product).join("curator-load"))
}

/// The folder of the programs of an image of this kind.
pub(super) fn programs(kind: Kind) -> PathBuf {
    workspace().join(TARGET).join(match kind {
        Kind::Product | Kind::Measurement => "appliance",
        Kind::Development => "debug",
    })
}

/// Builds programs; returns the crates that cargo compiled for it, in its order.
pub(crate) fn build_programs(kind: Kind, programs: &[&str]) -> Result<Vec<String>> {
    build_with(&cargo_arguments(kind, &workspace(), programs), programs)
}

/// Builds a program of the development image without fault injection, in its place. Only one
/// crate is compiled again for it; [`cargo_build`] brings the other one back.
pub(super) fn build_without_faults(program: &str) -> Result<()> {
    let start = Instant::now();
    let arguments = ["--workspace", "--features", TESTING].map(str::to_owned);
    let why = why(&build_with(&arguments, &[program])?);
    Terminal::default().step(&Report { name: "cargo", time: start.elapsed(), why });
    Ok(())
}

fn build_with(arguments: &[String], programs: &[&str]) -> Result<Vec<String>> {
    let mut cargo = cargo(&workspace())
        .args(if io::stderr().is_terminal() { &["build"][..] } else { &["build", "--quiet"] })
        // Errors of the compiler go to the standard error as text all the same.
        .arg("--message-format=json-render-diagnostics")
        .args(arguments)
        .args(programs.iter().flat_map(|program| ["--bin", program]))
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    let mut compiled = Vec::new();
    for line in cargo.stdout.take().into_iter().flat_map(|lines| BufReader::new(lines).lines()) {
        compiled.extend(compiled_by(&line.context("cannot read the messages of cargo")?));
    }
    let status = cargo.wait().context("cannot wait for cargo")?;
    if !status.success() {
        return Err(anyhow::anyhow!("cargo build ended with {status}"))
            .context(host::Help("see what cargo printed above".to_owned()));
    }
    Ok(compiled)
}

/// The part of a message of cargo that says whether a crate was compiled.
#[derive(Deserialize)]
struct Message {
    reason: String,
    target: Option<Target>,
    #[serde(default)]
    fresh: bool,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

/// The crate that a message of cargo calls compiled. Other lines, as of build scripts, name none.
fn compiled_by(line: &str) -> Option<String> {
    let message: Message = serde_json::from_str(line).ok()?;
    let compiled = message.reason == "compiler-artifact" && !message.fresh;
    message.target.filter(|_target| compiled).map(|target| target.name)
}

/// Why cargo had work to do; `None`: it had none.
fn why(compiled: &[String]) -> Option<String> {
    match compiled {
        [] => None,
        [one] => Some(format!("compiled {one}")),
        [first, others @ ..] => Some(format!("compiled {first} and {} more", others.len())),
    }
}

/// The cargo arguments by which the kinds of images differ.
fn cargo_arguments(kind: Kind, workspace: &Path, programs: &[&str]) -> Vec<String> {
    // Packages by name: for the whole workspace cargo would enable the features of
    // every package.
    let packages = programs.iter().flat_map(|program| ["--package", package(program)]);
    let shipped = || [shipped(workspace), packages.map(str::to_owned).collect()].concat();
    match kind {
        // The whole workspace, as the tests: the libraries are the same ones.
        Kind::Development => {
            vec!["--workspace".to_owned(), "--features".to_owned(), format!("{FAULTS},{TESTING}")]
        }
        Kind::Product => shipped(),
        // Cargo refuses a feature of a package that is not built.
        Kind::Measurement if !programs.contains(&"node") => shipped(),
        Kind::Measurement => [shipped(), ["--features", FAULTS].map(str::to_owned).into()].concat(),
    }
}

/// The profile of programs that are shipped, without a path of this machine, which would be
/// in the binaries as locations of panics.
fn shipped(workspace: &Path) -> Vec<String> {
    let home =
        env::var("CARGO_HOME").or_else(|_unset| env::var("HOME").map(|home| home + "/.cargo"));
    let flags = [(workspace.display().to_string(), "/polis"), (home.unwrap_or_default(), "/cargo")]
        .iter()
        .filter(|(from, _)| !from.is_empty())
        .map(|(from, to)| format!("\"--remap-path-prefix={from}={to}\""))
        .collect::<Vec<_>>()
        .join(",");
    let flags = format!("target.x86_64-unknown-linux-gnu.rustflags=[{flags}]");
    ["--profile", "appliance", "--config", &flags].map(str::to_owned).to_vec()
}

/// The package of a program.
fn package(program: &str) -> &'static str {
    match program {
        "init" => "polis-init",
        "node" => "polis-node",
        "polisctl" => "polisctl",
        "demo" => "polis-demo",
        "pause" => "polis-pause",
        _ => "polis-benches",
    }
}

/// The folder of the workspace: this package's parent.
pub(crate) fn workspace() -> PathBuf {
    let package = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let package = package.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    package.parent().map_or_else(|| PathBuf::from("."), Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_of_an_image_do_not_depend_on_the_callers_environment() {
        let command = cargo(Path::new("/w"));
        let set: Vec<_> = command.get_envs().collect();
        for name in ["CARGO_BUILD_TARGET", "CARGO_ENCODED_RUSTFLAGS", "RUSTFLAGS"] {
            assert!(set.contains(&(name.as_ref(), None)));
        }
        assert!(set.contains(&("CARGO_TARGET_DIR".as_ref(), Some("/w/target".as_ref()))));
        // Cargo has set both for this test.
        for name in ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME"] {
            assert!(env::var_os(name).is_some());
            assert!(set.contains(&(name.as_ref(), None)), "{name}");
        }
    }

    #[test]
    fn the_crates_that_cargo_compiled_are_why_it_ran() {
        let artifact = |name: &str, fresh: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"path+file:///w#0.1.0",
                "target":{{"kind":["lib"],"name":"{name}"}},"filenames":[],"fresh":{fresh}}}"#
            )
        };
        let others = [
            r#"{"reason":"build-script-executed","package_id":"x","linked_libs":[]}"#,
            r#"{"reason":"build-finished","success":true}"#,
            "a line of a build script",
        ];
        let of = |lines: &[String]| {
            let lines = lines.iter().map(String::as_str).chain(others);
            why(&lines.filter_map(compiled_by).collect::<Vec<_>>())
        };
        assert_eq!(of(&[artifact("polis_base", true), artifact("init", true)]), None);
        let one = [artifact("polis_base", true), artifact("node", false)];
        assert_eq!(of(&one).unwrap(), "compiled node");
        let all = ["polis_base", "init", "node"].map(|name| artifact(name, false));
        assert_eq!(of(&all).unwrap(), "compiled polis_base and 2 more");
    }

    #[test]
    fn a_product_has_no_faults_to_inject_and_no_path_of_this_machine() {
        let product = cargo_arguments(Kind::Product, Path::new("/w"), PROGRAMS);
        assert!(!product.iter().any(|argument| argument.contains("fault-injection")));
        assert!(product.iter().any(|flags| flags.contains("--remap-path-prefix=/w=/polis")));
        let development = cargo_arguments(Kind::Development, Path::new("/w"), PROGRAMS);
        assert!(development.iter().any(|argument| argument.contains(FAULTS)));
        // The measured image differs from the product only by the workload generators.
        let measured = cargo_arguments(Kind::Measurement, Path::new("/w"), PROGRAMS);
        assert_eq!(measured, [product, vec!["--features".to_owned(), FAULTS.to_owned()]].concat());
        assert_ne!(programs(Kind::Product), programs(Kind::Development));
    }
}
