// Package quantitytext bounds the text of resource quantities before they are parsed. The time to
// parse a quantity grows with the square of the number of digits. For small quantities it also
// grows with the exponent: "1e-9999999" takes more than a second.
package quantitytext

import (
	"fmt"
	"strings"
)

// MaxBytes is the largest length of a quantity's text that Check accepts. The sign, digits, point,
// exponent and suffix of an amount that need not be rounded take fewer than 40 bytes.
const MaxBytes = 128

// MaxExponentDigits is the largest number of digits in the exponent that Check accepts, without
// leading zeros.
const MaxExponentDigits = 3

// Check returns an error if the text could take long to parse as a resource.Quantity. It does not
// detect other errors.
func Check(text string) error {
	if len(text) > MaxBytes {
		return fmt.Errorf("quantity has %d bytes, the limit is %d", len(text), MaxBytes)
	}
	if n := exponentDigits(text); n > MaxExponentDigits {
		return fmt.Errorf("the exponent of the quantity has %d digits, the limit is %d", n, MaxExponentDigits)
	}
	return nil
}

// HasLongExponent reports whether the text ends in a decimal exponent of more than
// MaxExponentDigits digits.
func HasLongExponent(text string) bool { return exponentDigits(text) > MaxExponentDigits }

// exponentDigits returns the number of digits of the decimal exponent at the end of the text,
// without leading zeros. It returns 0 if there is no exponent.
func exponentDigits(text string) int {
	text = strings.TrimSpace(text)
	rest := strings.TrimRight(text, "0123456789")
	digits := strings.TrimLeft(text[len(rest):], "0")
	rest = strings.TrimRight(rest, "+-")
	if rest == "" || rest[len(rest)-1] != 'e' && rest[len(rest)-1] != 'E' {
		return 0
	}
	return len(digits)
}
