package node

import "testing"

// A node reports the build of its agent. An agent without one reports the Kubernetes version.
func TestNodeSaysItsRelease(t *testing.T) {
	for release, want := range map[string]string{
		"v0.2.0-abc": "keelson://0.2.0-abc",
		"abc-dirty":  "keelson://abc-dirty",
		"":           "keelson://" + Version[1:],
	} {
		info := systemInfo(release)
		if info.ContainerRuntimeVersion != want || info.KubeletVersion != Version {
			t.Errorf("of %q: %s, kubelet %s; want %s, %s", release, info.ContainerRuntimeVersion,
				info.KubeletVersion, want, Version)
		}
	}
}
