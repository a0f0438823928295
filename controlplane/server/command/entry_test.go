package command

import (
	"testing"
)

// Each release has its own image of the ingress proxies, so that an upgrade replaces them.
func TestIngressProxyImage(t *testing.T) {
	for version, want := range map[string]string{"v1.2.0": "keelson.dev/entry:v1.2.0",
		"v1.2.0+deb1": "keelson.dev/entry:v1.2.0-deb1"} {
		if got := runCommand(version).Flags().Lookup("entry-image").DefValue; got != want {
			t.Errorf("of %s: %s, want %s", version, got, want)
		}
	}
}
