package proxy

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent/proxy/proxytest"
	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// F112 F117: a name in a comment of a rule is short, and ends no statement.
func TestHostileNames(t *testing.T) {
	long := proxytest.Service(strings.Repeat("n", 63), "10.96.0.10", 0)
	long.Namespace = strings.Repeat("m", 63)
	if got := sanitizeComment(onlyPort(t, servicemodel.Compute([]*v1.Service{long}, nil, servicemodel.Location{})).
		Name); len(got) > 127 {
		t.Errorf("a comment of %d bytes", len(got))
	}
	if got := sanitizeComment("a\" }; flush ruleset; {"); got != "aflushruleset" {
		t.Errorf("%q", got)
	}
}
