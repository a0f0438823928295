package membership

import (
	"slices"
	"strings"
	"testing"
)

// Addresses of replicas may lack the port. Invalid addresses are refused immediately, before the
// first request.
func TestParseServerAddresses(t *testing.T) {
	got, err := parseServerAddresses([]string{"192.0.2.11", "192.0.2.11:7000", "cp1.example.com",
		"cp1:6444", "2001:db8::1",
		"[2001:db8::1]", "[2001:db8::1]:7"})
	want := []string{"192.0.2.11:6444", "192.0.2.11:7000", "cp1.example.com:6444", "cp1:6444", "[2001:db8::1]:6444",
		"[2001:db8::1]:6444", "[2001:db8::1]:7"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
	for _, invalid := range []string{"", ":6444", "cp1:", "https://cp1:6444", "a:b:c"} {
		if got, err := parseServerAddresses([]string{invalid}); err == nil ||
			!strings.Contains(err.Error(), "--server") {
			t.Errorf("%q is parsed as %q, error %v, want an error about --server", invalid, got, err)
		}
	}
}
