package config

import (
	"os"
	"path/filepath"
	"testing"
)

// FuzzConfiguration checks that any AuthenticationConfiguration, including its expressions, is
// either accepted or rejected without a panic.
func FuzzConfiguration(f *testing.F) {
	head := "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n"
	for _, text := range []string{
		"", head, head + "anonymous: {enabled: true, conditions: [{path: /livez}]}",
		head + "jwt: [{issuer: {url: 'https://i', audiences: [a]}, claimMappings: {username: {claim: " +
			"sub, prefix: ''}}}]",
		head + "jwt: [{issuer: {url: 'https://i', audiences: [a], certificateAuthority: x}, " +
			"claimMappings: {username: {expression: 'claims.sub'}}, " +
			"claimValidationRules: [{expression: 'claims.a == 1', message: no}], userValidationRules: [{expression: " +
			"'!user.username.startsWith(\"system:\")'}]}]",
		"a: &a [*a]",
	} {
		f.Add([]byte(text))
	}
	path := filepath.Join(f.TempDir(), "authn.yaml")
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		o := Defaults()
		o.ConfigFile = path
		if a, err := load(o); err == nil {
			a.Anonymous("/livez")
		}
	})
}
