//! The wire format of the TPM: puts structures into bytes and takes them apart.
//!
//! Numbers are big-endian; `TPM2B` is a length of two bytes and that many bytes.

/// A buffer that grows to the right.
#[derive(Debug, Default)]
#[must_use = "it returns itself with the value appended"]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Appends a byte.
    pub fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    /// Appends two bytes.
    pub fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Appends four bytes.
    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Appends bytes as they are.
    pub fn bytes(mut self, value: &[u8]) -> Self {
        self.0.extend(value);
        self
    }

    /// A `TPM2B`. The content is ours and short.
    pub fn sized(self, value: &[u8]) -> Self {
        self.length(value.len()).bytes(value)
    }

    fn length(self, length: usize) -> Self {
        self.u16(u16::try_from(length).unwrap_or(u16::MAX))
    }

    /// Everything that was appended.
    #[must_use]
    pub fn done(self) -> Vec<u8> {
        self.0
    }
}

/// The bytes and the structure do not end together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Short;

/// The rest, still to be read.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// Takes bytes from the front.
    ///
    /// # Errors
    ///
    /// [`Short`].
    pub fn take(&mut self, length: usize) -> Result<&'a [u8], Short> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Short)?;
        self.0 = rest;
        Ok(taken)
    }

    /// Takes as many bytes as the array has.
    ///
    /// # Errors
    ///
    /// [`Short`].
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Short> {
        self.take(N)?.try_into().map_err(|_never| Short)
    }

    /// Takes a byte.
    ///
    /// # Errors
    ///
    /// [`Short`].
    pub fn u8(&mut self) -> Result<u8, Short> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Takes two bytes.
    ///
    /// # Errors
    ///
    /// [`Short`].
    pub fn u16(&mut self) -> Result<u16, Short> {
        self.array().map(u16::from_be_bytes)
    }

    /// Takes four bytes.
    ///
    /// # Errors
    ///
    /// [`Short`].
    pub fn u32(&mut self) -> Result<u32, Short> {
        self.array().map(u32::from_be_bytes)
    }

    /// Takes a `TPM2B`.
    ///
    /// # Errors
    ///
    /// [`Short`].
    pub fn sized(&mut self) -> Result<&'a [u8], Short> {
        let length = self.u16()?;
        self.take(usize::from(length))
    }

    /// Fails unless everything was taken.
    ///
    /// # Errors
    ///
    /// [`Short`]: the structure ends before the bytes do.
    pub fn end(&self) -> Result<(), Short> {
        if self.0.is_empty() { Ok(()) } else { Err(Short) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_reads_back_and_no_length_is_trusted() {
        let bytes = Writer::default().u8(1).u16(2).u32(3).sized(b"four").done();
        let mut reader = Reader(&bytes);
        assert_eq!((reader.u8(), reader.u16(), reader.u32()), (Ok(1), Ok(2), Ok(3)));
        assert_eq!(reader.sized(), Ok(&b"four"[..]));
        assert_eq!((reader.end(), reader.u8()), (Ok(()), Err(Short)));
        assert_eq!(Reader(&[0xff, 0xff, 1]).sized(), Err(Short));
    }
}
