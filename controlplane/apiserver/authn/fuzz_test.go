package authn

import "testing"

// FuzzTokenFile checks that any token file is either accepted or rejected, and that no user has an
// empty name.
func FuzzTokenFile(f *testing.F) {
	f.Add([]byte("token,user,uid,\"a,b\"\n"))
	f.Add([]byte("\"\n,,,\nx"))
	f.Fuzz(func(t *testing.T, data []byte) {
		users, err := parseTokens(data)
		for token, u := range users {
			if err == nil && (u.Name == "" || token == "") {
				t.Errorf("%q lets %q in as %q", data, token, u.Name)
			}
		}
	})
}
