package quantitytext

import (
	"strings"
	"testing"
)

// F38: texts that take long to parse as quantities are recognized.
func TestCheck(t *testing.T) {
	for _, text := range []string{"", "1", "-1.5Gi", "1e3", "1E-9", "1E+999", "1e0000000012", "3E", "1Ei",
		strings.Repeat("9", MaxBytes),
		"no quantity e12345x", "123456789"} {
		if err := Check(text); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, text := range []string{strings.Repeat("9", MaxBytes+1), "1e1000", "1e-9999999",
		" 1E+2000000000 ", "1e0001000"} {
		if Check(text) == nil {
			t.Errorf("%q passes", text)
		}
	}
}
