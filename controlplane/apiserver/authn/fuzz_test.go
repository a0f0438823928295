package authn

import "testing"

// Whatever a token file says, it is taken or refused; nobody without a name comes of it.
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
