package session

import (
	"strings"
	"testing"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Of the certificates that an agent reports, at most one per known use is kept, and none with
// impossible values. F51
func TestValidCertificates(t *testing.T) {
	c := func(use, key string, begins, expires int64) *fleetv1.NodeCertificate {
		return &fleetv1.NodeCertificate{Use: use, Key: key, BeginsUnix: begins, ExpiresUnix: expires}
	}
	const key = "0123456789abcdef"
	for _, x := range []struct {
		name string
		said []*fleetv1.NodeCertificate
		want string
	}{
		{"nothing", nil, ""},
		{"both", []*fleetv1.NodeCertificate{c("serving", key, 1, 2), c("agent", key, 1, 2)}, "agent serving"},
		{"one twice", []*fleetv1.NodeCertificate{c("agent", key, 1, 2), c("agent", key, 3, 4)}, "agent"},
		{"a use of a later release", []*fleetv1.NodeCertificate{c("other", key, 1, 2), c("agent", key, 1, 2)}, "agent"},
		{"no key", []*fleetv1.NodeCertificate{c("agent", "\x1b[2J", 1, 2), c("serving", "", 1, 2), nil}, ""},
		{"no times", []*fleetv1.NodeCertificate{c("agent", key, 0, 2), c("agent", key, 5, 2),
			c("serving", key, 1, 1<<62)}, ""},
	} {
		var got []string
		for _, c := range validCertificates(x.said) {
			got = append(got, c.Use)
		}
		if strings.Join(got, " ") != x.want {
			t.Errorf("%s: %v, want %q", x.name, got, x.want)
		}
	}
}
