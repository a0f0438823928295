package node

import "testing"

// A node says which build its agent is. One that was built without any says the Kubernetes version, as before.
func TestNodeSaysItsRelease(t *testing.T) {
	for release, want := range map[string]string{
		"v0.2.0-abc": "keelson://0.2.0-abc",
		"abc-dirty":  "keelson://abc-dirty",
		"":           "keelson://" + Version[1:],
	} {
		info := systemInfo(release)
		if info.ContainerRuntimeVersion != want || info.KubeletVersion != Version {
			t.Errorf("of %q: %s, kubelet %s; want %s, %s", release, info.ContainerRuntimeVersion, info.KubeletVersion, want, Version)
		}
	}
}
