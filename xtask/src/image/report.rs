//! The report of `cargo xtask image` about an image that was built, or that it inspects.

use std::path::Path;

use polis_image::{Inspection, Manifest, Microcode, Signature, System};

pub(super) fn report(manifest: &Manifest, file: &Path, sha256: &str) {
    let sizes = &manifest.sizes;
    let line = |name: &str, bytes: u64| println!("  {name:<28} {bytes:>12}");
    println!("bytes by part:");
    line("kernel", sizes.kernel);
    line("initramfs", sizes.initramfs);
    line("microcode", sizes.microcode);
    line("unified kernel image", sizes.uki);
    line("system, erofs", sizes.erofs);
    line("system, hash tree", sizes.verity);
    line("what a node needs", sizes.uki + sizes.erofs + sizes.verity);
    line("ESP partition", sizes.esp_partition);
    line("each system partition", sizes.system_partition);
    if !manifest.moved.is_empty() {
        println!("NOT OF THE LOCK: {} packages moved, see above", manifest.moved.len());
    }
    println!("image {} ({})", manifest.image_version, file.display());
    println!("sha256 {sha256}");
}

fn print_microcode(microcode: &[Microcode]) {
    if microcode.is_empty() {
        println!("microcode: none");
    }
    for Microcode { vendor, bytes, updates, version } in microcode {
        let (package, version) = (vendor.package(), version.as_deref().unwrap_or("unknown"));
        match updates {
            Ok(updates) => {
                println!(
                    "microcode of {vendor}: {updates} updates, {bytes} bytes, {package} {version}"
                );
            }
            Err(fault) => println!("microcode of {vendor}: DAMAGED ({fault})"),
        }
    }
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn print(inspection: &Inspection) {
    println!("partitions:");
    for part in &inspection.partitions {
        let (start, length) = part.place;
        let (kind, own) = &part.guids;
        println!("  {:<16} at {start:>10}, {length:>11} bytes, type {kind}, guid {own}", part.name);
    }
    println!("sections of the unified kernel image:");
    for (name, length) in &inspection.sections {
        println!("  {name:<10} {length:>10}");
    }
    println!("os-release:");
    for line in inspection.os_release.lines() {
        println!("  {line}");
    }
    println!("kernel {}", inspection.kernel_release);
    match &inspection.etcd {
        Some(version) => println!("etcd {version}"),
        None => println!("etcd unknown"),
    }
    print_microcode(&inspection.microcode);
    println!("command line: {}", inspection.cmdline);
    match inspection.parameters {
        Some(length) => println!("parameters on the ESP: {length} bytes"),
        None => println!("parameters on the ESP: none"),
    }
    for (path, signature) in &inspection.signatures {
        match signature {
            Signature::Absent => println!("{path}: not signed"),
            Signature::Whole { subject, fingerprint } => {
                println!("{path}: signed by {subject}, SHA-256 {fingerprint}");
            }
            Signature::Damaged(fault) => println!("{path}: DAMAGED ({fault})"),
        }
    }
    if let Some(hash) = &inspection.authenticode {
        println!("Authenticode SHA-256 of the kernel image: {}", digits(hash));
    }
    println!("registers of a TPM after its start:");
    for (number, value) in &inspection.registers {
        println!("  {number:<2} {}", digits(value));
    }
    match &inspection.system {
        System::Intact => println!("system: intact"),
        System::Damaged { root_hash } => println!("system: DAMAGED (its root hash is {root_hash})"),
        System::TreeDamaged => println!("system: DAMAGED (its hash tree is not that of its data)"),
    }
    match inspection.kind {
        Some(kind) => println!("kind: {kind}"),
        None => println!("kind: unknown"),
    }
    match inspection.variant {
        Some(variant) => println!("variant: {variant}"),
        None => println!("variant: unknown"),
    }
    match &inspection.moved[..] {
        [] => println!("payload: of the lock"),
        moved => {
            println!("payload: NOT OF THE LOCK, {} packages moved:", moved.len());
            for moved in moved {
                println!("  {moved}");
            }
        }
    }
    println!("packages:");
    for line in inspection.packages.lines() {
        println!("  {line}");
    }
}
