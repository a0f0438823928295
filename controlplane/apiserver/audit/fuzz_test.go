package audit

import "testing"

// FuzzPolicy checks that any policy file is either accepted or rejected, and that an accepted one
// decides every request.
func FuzzPolicy(f *testing.F) {
	f.Add([]byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: [{level: Metadata, verbs: [get], resources: " +
		"[{group: apps, resources: [\"*/status\"]}]}]"))
	f.Add([]byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: None, " +
		"nonResourceURLs: [\"/a*\"]}]"))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := parsePolicy(data)
		if (err == nil) == (p == nil) {
			t.Fatalf("%q: %v %v", data, p, err)
		}
		if err == nil {
			p.verdictFor(&Attributes{})
		}
	})
}
