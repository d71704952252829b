//! The tag of a VLAN (IEEE 802.1Q) in a frame: put in, and taken out.
//!
//! ```text
//! 0           6           12        16
//! | to        | from      | 8100 id | type, content
//! ```

/// The addresses before the tag.
const ADDRESSES: usize = 12;
/// The type of a tagged frame.
const TAGGED: [u8; 2] = [0x81, 0x00];
/// The bits of the tag that are the ID; the others are a priority.
const ID: u16 = 0x0fff;

/// The frame with a tag; `None` if it is too short to be one.
pub(crate) fn tagged(frame: &[u8], id: u16) -> Option<Vec<u8>> {
    let (addresses, rest) = frame.split_at_checked(ADDRESSES)?;
    Some([addresses, &TAGGED, &(id & ID).to_be_bytes(), rest].concat())
}

/// The frame without the tag of this VLAN; `None` if it has another tag or none.
pub(crate) fn untagged(frame: &[u8], id: u16) -> Option<Vec<u8>> {
    let (addresses, rest) = frame.split_at_checked(ADDRESSES)?;
    let (kind, rest) = rest.split_first_chunk::<2>()?;
    let (tag, rest) = rest.split_first_chunk::<2>()?;
    let fits = *kind == TAGGED && u16::from_be_bytes(*tag) & ID == id;
    fits.then(|| [addresses, rest].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_taken_out_as_it_was_put_in() {
        let frame: Vec<u8> = (0..60).collect();
        let with = tagged(&frame, 4094).unwrap();
        assert_eq!((with.len(), &with[12..16]), (64, &[0x81, 0x00, 0x0f, 0xfe][..]));
        assert_eq!(untagged(&with, 4094).as_deref(), Some(&frame[..]));
        assert_eq!((untagged(&with, 7), untagged(&frame, 7)), (None, None));
        for short in 0..16 {
            assert_eq!(untagged(&with[..short], 4094), None);
        }
    }

    #[test]
    fn a_priority_is_no_part_of_the_id() {
        let mut with = tagged(&[0; 20], 7).unwrap();
        with[14] |= 0xe0;
        assert!(untagged(&with, 7).is_some());
    }
}
