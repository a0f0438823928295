package authz

import "testing"

// FuzzABAC checks that any policy line is either accepted or rejected, and that an accepted one
// decides every request.
func FuzzABAC(f *testing.F) {
	f.Add([]byte(`{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"user":"*",` +
		`"resource":"*","namespace":"*"}}`))
	f.Add([]byte(`{"user":"alice","readonly":true}`))
	f.Add([]byte(`{"kind":"Policy","spec":null}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		if p, err := parseABAC(line); err == nil {
			p.allowsRequest(&Attributes{})
		}
	})
}
