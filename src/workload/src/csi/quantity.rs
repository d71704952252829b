//! The size in a claim: reads a quantity of Kubernetes as whole bytes.
//!
//! `1Gi`, `1.5G`, `1e9` and `1000m` are quantities: digits, perhaps a fraction, and a
//! suffix. A fraction of a byte is rounded up, as the API server does. See
//! `k8s.io/apimachinery/pkg/api/resource`.

/// The longest text that is read: the API server shortens what it keeps.
const LENGTH_MAX: usize = 40;

/// The largest exponent of ten in either direction.
const EXPONENT_MAX: u32 = 18;

/// Why a text is not a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    /// It is not a quantity.
    #[error("it is not a quantity such as 10Gi")]
    Malformed,
    /// It is not a size.
    #[error("a size is larger than 0")]
    NotPositive,
    /// It is larger than a disk can be.
    #[error("it is larger than any disk")]
    TooLarge,
}

/// The bytes of a quantity, rounded up.
///
/// # Errors
///
/// [`Error`].
pub(super) fn bytes(text: &str) -> Result<u64, Error> {
    if text.len() > LENGTH_MAX {
        return Err(Error::Malformed);
    }
    if text.starts_with('-') {
        return Err(Error::NotPositive);
    }
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (multiplier, divisor) = scale(suffix).ok_or(Error::Malformed)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{fraction}");
    if digits.is_empty() || !digits.bytes().all(|c| c.is_ascii_digit()) {
        return Err(Error::Malformed);
    }
    let digits: u128 = digits.parse().map_err(|_long| Error::TooLarge)?;
    let places = u32::try_from(fraction.len()).map_err(|_long| Error::Malformed)?;
    let divisor = 10_u128.checked_pow(places).and_then(|power| power.checked_mul(divisor));
    // Forty digits behind the point: the last ones count less than a byte.
    let divisor = divisor.ok_or(Error::Malformed)?;
    let product = digits.checked_mul(multiplier).ok_or(Error::TooLarge)?;
    match u64::try_from(product.div_ceil(divisor)) {
        Ok(0) => Err(Error::NotPositive),
        Ok(bytes) if i64::try_from(bytes).is_ok() => Ok(bytes),
        Ok(_) | Err(_) => Err(Error::TooLarge),
    }
}

/// The factor and the divisor of a suffix.
fn scale(suffix: &str) -> Option<(u128, u128)> {
    let binary = |power: u32| Some((1 << (10 * power), 1));
    let decimal = |power: u32| Some((10_u128.pow(power), 1));
    match suffix {
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        "n" => Some((1, 10_u128.pow(9))),
        "u" => Some((1, 10_u128.pow(6))),
        "m" => Some((1, 1000)),
        "" => decimal(0),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        exponent => {
            let exponent = exponent.strip_prefix(['e', 'E'])?;
            let (negative, digits) = match exponent.strip_prefix('-') {
                Some(digits) => (true, digits),
                None => (false, exponent.strip_prefix('+').unwrap_or(exponent)),
            };
            let plain = !digits.is_empty() && digits.bytes().all(|c| c.is_ascii_digit());
            let power: u32 = plain.then(|| digits.parse().ok())??;
            let power = (power <= EXPONENT_MAX).then(|| 10_u128.pow(power))?;
            Some(if negative { (1, power) } else { (power, 1) })
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_read_as_the_api_server_does() {
        for (text, expected) in [
            ("1", 1),
            ("+1", 1),
            ("1Gi", 1 << 30),
            ("1.5Gi", 3 << 29),
            ("0.5Ki", 512),
            (".5Ki", 512),
            ("5.Ki", 5120),
            ("1G", 1_000_000_000),
            ("1k", 1000),
            ("1e3", 1000),
            ("1E+3", 1000),
            ("1500e-3", 2),
            ("1000m", 1),
            ("1001m", 2),
            ("1n", 1),
            ("7Ei", 7 << 60),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        use Error::{Malformed, NotPositive, TooLarge};
        let long = "1".repeat(41);
        for (text, expected) in [
            ("", Malformed),
            (".", Malformed),
            ("Gi", Malformed),
            ("1gi", Malformed),
            ("1 Gi", Malformed),
            ("1.2.3", Malformed),
            ("1e", Malformed),
            ("1e99999999999", Malformed),
            ("0x10", Malformed),
            ("\u{661}", Malformed),
            (long.as_str(), Malformed),
            ("-1", NotPositive),
            ("0", NotPositive),
            ("0.0Gi", NotPositive),
            ("8Ei", TooLarge),
            ("999999999999999999999999999999999999999", TooLarge),
            ("340282366920938463463374607431768211455E", TooLarge),
        ] {
            assert_eq!(bytes(text), Err(expected), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_is_a_panic(text in ".{0,50}") {
            let _read = bytes(&text);
        }

        #[test]
        fn whole_bytes_stay_what_they_are(size in 1_u64..1 << 62) {
            prop_assert_eq!(bytes(&size.to_string()), Ok(size));
        }
    }
}
