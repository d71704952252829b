//! The formats of a file with node parameters: the message, its text, a disk with user data.
//!
//! ```text
//! message --encode--> bytes of a file --decode--> message, and its format
//! ```
//!
//! What this module does not do: check the message (`polis_wire::parameters`).

use std::fmt;
use std::io::{self, Read};

use polis_wire::parameters::{self, ARMOUR, BYTES_MAX, disk};
use serde::Serialize;

use super::image;
use crate::error::{Error, Explain as _};

/// The format of a file with node parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Format {
    /// The protocol buffers message, for fw_cfg and the ESP.
    #[default]
    Message,
    /// One line of text, for SMBIOS OEM strings and fields for user data.
    Text,
    /// A NoCloud disk image (FAT, labelled CIDATA), to attach to a virtual machine.
    Disk,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Message => "message",
            Self::Text => "text",
            Self::Disk => "disk",
        })
    }
}

impl Format {
    /// The file with this message.
    pub(super) fn encode(self, message: &[u8]) -> Result<Vec<u8>, Error> {
        match self {
            Self::Message => Ok(message.to_vec()),
            Self::Text => Ok(format!("{}\n", text(message)?).into_bytes()),
            // As text, a person can read it and copy it from there.
            Self::Disk => image::nocloud(text(message)?.as_bytes())
                .doing(|| "cannot make the disk image".to_owned()),
        }
    }
}

/// Bytes of user data that Amazon EC2 takes, before it encodes them. The other clouds take as much
/// as a node, or half of it.
const EC2_MAX: usize = 16 << 10;

impl Format {
    /// The warning about a file with so many bytes.
    pub(super) fn warning(self, bytes: usize) -> Option<String> {
        let large = self == Self::Text && bytes > EC2_MAX;
        large.then(|| {
            format!("it is too large for Amazon EC2, which takes {EC2_MAX} bytes of user data")
        })
    }
}

/// The text of a message that a node accepts.
fn text(message: &[u8]) -> Result<String, Error> {
    let text = parameters::text(message);
    if text.len() as u64 > BYTES_MAX {
        let what =
            format!("the parameters are {} bytes as text; allowed are {BYTES_MAX}", text.len());
        return Err(Error::new(what)
            .or_help("name fewer labels, routes or nodes, or write them with `--format message`"));
    }
    Ok(text)
}

/// Node parameters, with the format in which they were.
#[derive(Debug)]
pub(super) struct Decoded {
    pub(super) format: Format,
    /// The file on the disk, of a disk image.
    pub(super) file: Option<&'static str>,
    pub(super) message: Vec<u8>,
}

impl Decoded {
    /// The format, for people.
    pub(super) fn described(&self) -> String {
        match self.file {
            Some(file) => format!("{}, {file}", self.format),
            None => self.format.to_string(),
        }
    }
}

/// Reads a file: node parameters up to their limit, and a disk image up to its own.
pub(super) fn read(mut input: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // The labels of a disk are within that.
    input.by_ref().take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if image::recognise(&bytes).is_some() {
        input.take(image::SIZE_MAX).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

/// Finds the message in the bytes of a file.
pub(super) fn decode(bytes: Vec<u8>) -> Result<Decoded, Error> {
    let Some((source, file_system)) = image::recognise(&bytes) else {
        let format = match bytes.starts_with(ARMOUR.as_bytes()) {
            true => Format::Text,
            false => Format::Message,
        };
        return Ok(Decoded { format, file: None, message: message(bytes)? });
    };
    let file = disk::user_data(source);
    if file_system == disk::FileSystem::Iso9660 {
        let what =
            "it is an ISO 9660 image; allowed are the message, its text, and a disk image with FAT";
        return Err(Error::new(what).or_help(format!("mount the image, and check its file {file}")));
    }
    let content = image::file(bytes, file).doing(|| cannot_use(file)).help(again)?;
    let content = content.ok_or_else(|| Error::new(format!("the disk has no file {file}")));
    let content = content.help(again)?;
    if let Some(why) = disk::foreign(&content) {
        return Err(Error::new(format!("{file} on the disk is {why}")).or_help(again()));
    }
    let message = message(content).doing(|| cannot_use(file))?;
    Ok(Decoded { format: Format::Disk, file: Some(file), message })
}

/// The failure to use a file of a disk, which has a cause.
pub(super) fn cannot_use(file: &str) -> String {
    format!("cannot use {file} on the disk")
}

fn again() -> String {
    "`polisctl parameters bootstrap` and `polisctl parameters register` write a whole disk image \
     with `--format disk`"
        .to_owned()
}

fn message(bytes: Vec<u8>) -> Result<Vec<u8>, Error> {
    if bytes.len() as u64 > BYTES_MAX {
        let help = "name a file that `polisctl parameters bootstrap` or `polisctl parameters \
                    register` wrote";
        return Err(Error::from(parameters::Error::TooLarge).or_help(help));
    }
    parameters::message(bytes).help(|| {
        "`polisctl parameters bootstrap` and `polisctl parameters register` write the text with \
         `--format text`"
            .to_owned()
    })
}
