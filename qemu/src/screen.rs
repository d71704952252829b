//! A picture of a guest's screen, for checks of its colours.

use std::fs;
use std::io;
use std::path::Path;

/// A screen, as QEMU dumps it in the `ppm` format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Columns of pixels.
    pub width: usize,
    /// Rows of pixels.
    pub height: usize,
    pixels: Vec<[u8; 3]>,
}

impl Picture {
    /// Reads a dump.
    ///
    /// # Errors
    /// When the file cannot be read or is not a whole picture.
    pub fn read(file: &Path) -> io::Result<Self> {
        let bytes = fs::read(file)?;
        Self::parse(&bytes).ok_or_else(|| {
            let problem = format!("{} is not a complete PPM picture", file.display());
            io::Error::new(io::ErrorKind::InvalidData, problem)
        })
    }

    /// `P6 width height 255`, one white space, then three bytes a pixel.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(b"P6")?;
        let mut numbers = [0_usize; 3];
        for number in &mut numbers {
            let start = rest.iter().position(u8::is_ascii_digit)?;
            let digits = rest[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            *number = str::from_utf8(&rest[start..start + digits]).ok()?.parse().ok()?;
            rest = &rest[start + digits..];
        }
        let [width, height, 255] = numbers else { return None };
        let (chunks, []) = rest.get(1..)?.as_chunks::<3>() else { return None };
        (chunks.len() == width.checked_mul(height)?).then(|| Self {
            width,
            height,
            pixels: chunks.to_vec(),
        })
    }

    /// The share of pixels, 0.0 to 1.0, for which `which` holds.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a screen has far fewer than 2^52 pixels")]
    pub fn share(&self, which: impl Fn([u8; 3]) -> bool) -> f64 {
        let count = self.pixels.iter().filter(|pixel| which(**pixel)).count();
        count as f64 / self.pixels.len().max(1) as f64
    }
}

/// Whether a pixel is plainly red.
#[must_use]
pub fn is_red([red, green, blue]: [u8; 3]) -> bool {
    red > 100 && green < red / 2 && blue < red / 2
}

/// Whether a pixel is plainly blue.
#[must_use]
pub fn is_blue([red, green, blue]: [u8; 3]) -> bool {
    blue > 100 && red < blue / 2 && green < blue / 2
}

/// Whether a pixel is black.
#[must_use]
pub fn is_black(pixel: [u8; 3]) -> bool {
    pixel == [0; 3]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_is_counted_by_colour() {
        let picture =
            Picture::parse(b"P6\n2 2\n255\n\xaa\0\0\0\0\0\xff\xff\xff\xaa\x11\0").unwrap();
        assert_eq!((picture.width, picture.height), (2, 2));
        assert!((picture.share(is_red) - 0.5).abs() < 1e-9);
        assert!((picture.share(is_black) - 0.25).abs() < 1e-9);
    }

    #[test]
    fn half_a_picture_is_refused() {
        assert_eq!(Picture::parse(b"P6\n2 2\n255\n\0\0\0"), None);
        assert_eq!(Picture::parse(b"P5\n1 1\n255\n\0\0\0"), None);
        assert_eq!(Picture::parse(b""), None);
    }
}
