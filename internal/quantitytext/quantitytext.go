// Package quantitytext bounds the texts of quantities before they are parsed. The time to parse a quantity grows with the
// square of its digits, and that of a small one with the size of its exponent: "1e-9999999" takes more than a second.
package quantitytext

import (
	"fmt"
	"strings"
)

// MaxBytes is how many bytes the text of a quantity may have. Sign, digits, point, exponent and suffix of any amount that
// is not rounded take fewer than 40.
const MaxBytes = 128

// MaxExponent is how many digits the exponent of a quantity may have, without leading zeros.
const MaxExponent = 3

// Check returns an error if the text would take long to parse as a quantity. Other errors are left to the parser.
func Check(text string) error {
	if len(text) > MaxBytes {
		return fmt.Errorf("a quantity of %d bytes, at most %d are read", len(text), MaxBytes)
	}
	if n := exponentDigits(text); n > MaxExponent {
		return fmt.Errorf("a quantity whose exponent has %d digits, at most %d are read", n, MaxExponent)
	}
	return nil
}

// HasLongExponent reports whether the text ends in a decimal exponent of more than MaxExponent digits.
func HasLongExponent(text string) bool { return exponentDigits(text) > MaxExponent }

// exponentDigits returns how many digits the exponent has that the text ends in, 0 if it ends in none.
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
