package issuer

import (
	"encoding/json"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/apis/apiserver"

	"keelson.dev/keelson/controlplane/apiserver/authn/issuer/issuertest"
)

// FuzzToken checks that a token is accepted only if the issuer signed it.
func FuzzToken(f *testing.F) {
	p := &provider{Provider: issuertest.New(f), t: f}
	i := p.issuer(nil)
	good := p.Token(nil)
	head, rest, _ := strings.Cut(good, ".")
	payload, signature, _ := strings.Cut(rest, ".")
	for _, token := range []string{
		good, head + ".." + signature, head + "." + payload + ".", "." + payload + "." + signature,
		good + "=", " " + good,
		p.Unsigned(`{"alg":"none"}`, nil, nil), p.Unsigned(`{"alg":"RS256","kid":"one","b64":false,"crit":["b64"]}`,
			nil, []byte("x")),
		p.Unsigned(`{"alg":["RS256"],"kid":1}`, nil, nil),
		p.Unsigned(`{"alg":"RS256","jwk":{"kty":"oct","k":"AA"}}`, nil, nil),
	} {
		f.Add(token)
	}
	f.Fuzz(func(t *testing.T, token string) {
		id, ok, err := i.VerifyToken(t.Context(), token, nil)
		if ok && (token != good || err != nil || id.User.Name != "oidc:alice") {
			t.Errorf("%q is good for %+v, %v", token, id.User, err)
		}
	})
}

// FuzzExpression checks that any expression with any claims is rejected or evaluated in bounded
// time.
func FuzzExpression(f *testing.F) {
	for _, e := range []string{
		"claims.sub", "claims.a.b__dot__c[0]", "dyn(claims.l).map(x, x + x)",
		"claims.l.all(x, claims.l.all(y, x == y)) ? 'a' : 'b'",
		"string(claims.n)", "claims.sub.matches('(a*)*b')",
		"[1,2,3].map(a, [1,2,3].map(b, [1,2,3].map(c, string(a))))[0][0][0]",
		"claims.?absent.orValue('none')", "has(claims.m.x) ? claims.m.x : ''", "claims", "null", "1/0 == 1 ? 'a' : 'b'",
	} {
		f.Add(e, `{"sub":"a","l":["x","y"],"n":1,"m":{"x":"y"},"a":{"b.c":["d"]}}`)
	}
	p := &provider{Provider: issuertest.New(f), t: f}
	compiler := p.compiler()
	f.Fuzz(func(t *testing.T, expression, text string) {
		var c claims
		if len(expression) > 4<<10 || len(text) > 16<<10 || json.Unmarshal([]byte(text), &c) != nil {
			return
		}
		conf := p.conf()
		conf.ClaimMappings.Username = apiserver.PrefixedClaimOrExpression{Expression: expression}
		conf.ClaimMappings.Groups = apiserver.PrefixedClaimOrExpression{Expression: expression}
		i, err := New(Config{JWT: conf, Compiler: compiler})
		if err != nil {
			return
		}
		if u, err := i.mapUser(t.Context(), c); err == nil && u.Name == "" {
			t.Errorf("%s makes a user without a name of %s", expression, text)
		}
	})
}
