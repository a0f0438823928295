package kctl

import (
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/pki"
)

// What the control plane writes of a token is what a person reads: who may join, who has, and until when.
func TestTokenList(t *testing.T) {
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	trust, err := pki.NewTrust("test", now)
	if err != nil {
		t.Fatal(err)
	}
	record := func(role pki.Role, g pki.Grant, users ...string) *v1.Secret {
		t.Helper()
		token := pki.NewToken(role, trust.CA.Cert)
		s := trust.TokenKey().Record(token, g)
		for _, name := range users {
			if s, err = trust.TokenKey().UseToken(token, s, name, name+"/0123456789abcdef", now.Add(-time.Hour)); err !=
				nil {
				t.Fatal(err)
			}
		}
		s.Name = tokenSecrets + string(role)[:2] + strings.Repeat("x", 2+len(users))
		return s
	}
	var rows []tokenRow
	for _, s := range []*v1.Secret{
		record(pki.RoleNode, pki.Grant{Expires: now.Add(-time.Minute), Uses: 3, Note: "made with the cluster"}, "w1",
			"w2"),
		record(pki.RoleNode, pki.Grant{Expires: now.Add(24 * time.Hour), Uses: 1, Names: []string{"w4"},
			Replace: true}),
		record(pki.RoleControlPlane, pki.Grant{Expires: now.Add(time.Hour), Uses: 1}),
		{Type: tokenSecretsType},
	} {
		rows = append(rows, newTokenRow(s, now))
	}
	var out strings.Builder
	if err := printTokens(&out, rows); err != nil {
		t.Fatal(err)
	}
	want :=
		`ID       ROLE           USED     EXPIRES                          NAMES                        JOINED   DESCRIPTION
coxx     controlplane   0 of 1   2026-11-26T13:00:00Z             any                          -        -
noxx     node           0 of 1   2026-11-27T12:00:00Z             w4 (also Nodes that exist)   -        -
         -              - of -   - (expired)                      any                          -        -
noxxxx   node           2 of 3   2026-11-26T11:59:00Z (expired)   any                          w1,w2    made with the cluster
`
	if out.String() != want {
		t.Errorf("it says\n%s\nwant\n%s", out.String(), want)
	}
	out.Reset()
	if err := printTokens(&out, nil); err != nil || !strings.Contains(out.String(), "kctl cluster token create") {
		t.Errorf("of none it says %q, %v", out.String(), err)
	}
}

func TestTokenID(t *testing.T) {
	for arg, want := range map[string]string{"abcdef": "abcdef", "keelson1.node.abc123.SECRET.0011": "abc123",
		"": "", "a/b": "", "..": "", "keelson1.node.abc": "", "keelson2.node.abc.s.p": "", "keelson1.node.A!.s.p": "",
		strings.Repeat("a", 33): ""} {
		id, err := tokenID(arg, 1)
		if id != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", arg, id, err)
		}
		if err != nil && arg != "" && strings.Contains(err.Error(), arg) {
			t.Errorf("the error tells what may be a secret: %v", err)
		}
	}
}
