package issuer

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"golang.org/x/time/rate"
	"k8s.io/apiserver/pkg/apis/apiserver"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/apiserver/authn/issuer/issuertest"
)

func verified(t *testing.T, i *Issuer, token string) api.User {
	t.Helper()
	id, ok, err := i.VerifyToken(t.Context(), token, nil)
	if !ok || err != nil {
		t.Fatalf("a good token: %t, %v", ok, err)
	}
	return id.User
}

func refusedFor(t *testing.T, i *Issuer, what, token, why string) {
	t.Helper()
	if id, ok, err := i.VerifyToken(t.Context(), token, nil); ok || err == nil || !strings.Contains(err.Error(), why) {
		t.Errorf("%s: %+v, %t, %v; want %q", what, id.User, ok, err, why)
	}
}

// Claims are mapped to a user, by claim name or by expression, if all validation rules hold.
func TestClaimsBecomeUsers(t *testing.T) {
	p := newProvider(t)
	none := ""
	byName := p.issuer(func(c *apiserver.JWTAuthenticator) {
		c.ClaimMappings.Groups = apiserver.PrefixedClaimOrExpression{Claim: "roles",
			Prefix: c.ClaimMappings.Username.Prefix}
		c.ClaimMappings.UID.Claim = "oid"
		c.ClaimValidationRules = []apiserver.ClaimValidationRule{{Claim: "hd", RequiredValue: "example.org"}}
	})
	good := map[string]any{"roles": []string{"dev", "ops"}, "oid": "17", "hd": "example.org", "jti": "x1"}
	want := api.User{Name: "oidc:alice", UID: "17", Groups: []string{"oidc:dev", "oidc:ops"},
		Extra: map[string][]string{credentialID: {"JTI=x1"}}}
	if u := verified(t, byName, p.Token(good)); !reflect.DeepEqual(u, want) {
		t.Errorf("got %+v", u)
	}
	good["roles"] = "dev"
	if u := verified(t, byName, p.Token(good)); !slices.Equal(u.Groups, []string{"oidc:dev"}) {
		t.Errorf("one group as a text: %v", u.Groups)
	}
	good["hd"] = "elsewhere.org"
	refusedFor(t, byName, "another hosted domain", p.Token(good), "required claim hd value does not match")
	delete(good, "hd")
	refusedFor(t, byName, "no hosted domain", p.Token(good), "required claim hd")
	good["hd"], good["_claim_names"] = "example.org", map[string]string{"roles": "src"}
	good["_claim_sources"] = map[string]any{"src": map[string]string{"endpoint": "https://127.0.0.1:1/"}}
	delete(good, "roles")
	refusedFor(t, byName, "distributed groups", p.Token(good), "distributed")

	byMail := p.issuer(func(c *apiserver.JWTAuthenticator) {
		c.ClaimMappings.Username = apiserver.PrefixedClaimOrExpression{Claim: "email", Prefix: &none}
	})
	if u := verified(t, byMail, p.Token(map[string]any{"email": "a@example.org", "email_verified": true})); u.Name !=
		"a@example.org" {
		t.Errorf("got %+v", u)
	}
	refusedFor(t, byMail, "unverified mail", p.Token(map[string]any{"email": "a@example.org", "email_verified": false}),
		"email not verified")

	byExpression := p.issuer(func(c *apiserver.JWTAuthenticator) {
		c.ClaimMappings = apiserver.ClaimMappings{
			Username: apiserver.PrefixedClaimOrExpression{Expression: "'x:' + claims.sub"},
			Groups:   apiserver.PrefixedClaimOrExpression{Expression: "dyn(claims.roles).map(r, 'x:' + r)"},
			UID:      apiserver.ClaimOrExpression{Expression: "claims.nested.example__dot__org.id"},
			Extra: []apiserver.ExtraMapping{
				{Key: "example.org/admin", ValueExpression: "(has(claims.admin) && claims.admin) ? 'true' : ''"},
				{Key: "example.org/teams", ValueExpression: "claims.teams"},
			},
		}
		c.ClaimValidationRules = []apiserver.ClaimValidationRule{{Expression: "claims.exp - claims.iat <= 7200.0",
			Message: "tokens live two hours at most"}}
		c.UserValidationRules = []apiserver.UserValidationRule{{Expression: "!user.username.startsWith('x:system:')",
			Message: "no system users"}}
	})
	more := map[string]any{
		"roles": []string{"dev"}, "nested": map[string]any{"example.org": map[string]string{"id": "42"}}, "admin": true,
		"teams": []string{"a", "", "b"}, "iat": time.Now().Unix(),
	}
	want = api.User{Name: "x:alice", UID: "42", Groups: []string{"x:dev"}, Extra: map[string][]string{
		"example.org/admin": {"true"}, "example.org/teams": {"a", "b"},
	}}
	if u := verified(t, byExpression, p.Token(more)); !reflect.DeepEqual(u, want) {
		t.Errorf("got %+v", u)
	}
	more["sub"] = "system:admin"
	refusedFor(t, byExpression, "a system user", p.Token(more), "no system users")
	more["sub"], more["iat"] = "alice", time.Now().Add(-3*time.Hour).Unix()
	refusedFor(t, byExpression, "a token that lives long", p.Token(more), "tokens live two hours at most")
	more["iat"], more["roles"] = time.Now().Unix(), 7
	refusedFor(t, byExpression, "groups of another type", p.Token(more), "group claim expression")
}

// F23: a token is valid only for its issuer, its audience and its validity period.
func TestTokensHaveBounds(t *testing.T) {
	p := newProvider(t)
	i := p.issuer(func(c *apiserver.JWTAuthenticator) {
		c.Issuer.Audiences, c.Issuer.AudienceMatchPolicy = []string{"keelson", "other"},
			apiserver.AudienceMatchPolicyMatchAny
	})
	verified(t, i, p.Token(map[string]any{"aud": []string{"third", "other"}}))
	refusedFor(t, i, "another audience", p.Token(map[string]any{"aud": "third"}), "expected audience")
	refusedFor(t, i, "no audience", p.Token(map[string]any{"aud": nil}), "expected audience")
	refusedFor(t, i, "expired", p.Token(map[string]any{"exp": time.Now().Add(-time.Minute).Unix()}), "expired")
	refusedFor(t, i, "without an end", p.Token(map[string]any{"exp": nil}), "verify token")
	refusedFor(t, i, "of the future", p.Token(map[string]any{"nbf": time.Now().Add(time.Hour).Unix()}), "not before")
	for _, token := range []string{p.Token(map[string]any{"iss": p.URL + "/"}), "a.b.c", "", "abc",
		strings.Repeat(".", 1<<20), "e30.e30.e30"} {
		if _, ok, err := i.VerifyToken(t.Context(), token, nil); ok || err != nil {
			t.Errorf("a token of others: %t, %v", ok, err)
		}
	}
}

// Tokens that the issuer's keys did not sign are rejected: without a signature, with a public key
// as shared secret, with another key of the same ID, or with a key in the header.
func TestConfusedSignatures(t *testing.T) {
	p := newProvider(t)
	secret := base64.RawURLEncoding.EncodeToString([]byte("a secret that everybody can read"))
	var public *rsa.PublicKey
	p.Change(func(b *issuertest.Behavior) {
		public = b.Keys[0].Key.(*rsa.PublicKey)
		b.Raw = []string{`{"kty":"oct","kid":"shared","alg":"HS256","k":"` + secret + `"}`,
			`{"kty":"OKP","crv":"X448","x":"AA"}`, `{"kty":"what"}`}
	})
	i := p.issuer(nil)
	verified(t, i, p.Token(nil))
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	hmac := func(key []byte, id string) string {
		s, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.HS256, Key: jose.JSONWebKey{Key: key, KeyID: id}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return p.SignedBy(s, nil)
	}
	other, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	stranger := func(o *jose.SignerOptions) string {
		s, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.RS256, Key: jose.JSONWebKey{Key: other, KeyID: "one"}},
			o)
		if err != nil {
			t.Fatal(err)
		}
		return p.SignedBy(s, nil)
	}
	for what, token := range map[string]string{
		"alg none":                     p.Unsigned(`{"alg":"none"}`, nil, nil),
		"alg None":                     p.Unsigned(`{"alg":"None","kid":"one"}`, nil, []byte("x")),
		"no alg":                       p.Unsigned(`{"kid":"one"}`, nil, []byte("x")),
		"RS256 without a signature":    p.Unsigned(`{"alg":"RS256","kid":"one"}`, nil, nil),
		"HS256 with the public key":    hmac(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), "one"),
		"HS256 with the DER":           hmac(der, "one"),
		"HS256 with the shared secret": hmac([]byte("a secret that everybody can read"), "shared"),
		"another's key":                stranger(nil),
		"a key in the header":          stranger(&jose.SignerOptions{EmbedJWK: true}),
		"a critical header":            stranger((&jose.SignerOptions{}).WithCritical("exp")),
	} {
		if _, ok, err := i.VerifyToken(t.Context(), token, nil); ok || err == nil {
			t.Errorf("%s: %t, %v", what, ok, err)
		}
	}
}

// Key rotation needs no notification. Elliptic curve keys are supported too.
func TestKeysRotate(t *testing.T) {
	p := newProvider(t)
	i := p.issuer(nil)
	old := p.Token(nil)
	verified(t, i, old)
	p.Rotate("two")
	verified(t, i, p.Token(nil))
	refusedFor(t, i, "by the former key", old, "verify")
	key := ecKey(t)
	p.Sign("three", jose.ES256, key, &key.PublicKey)
	verified(t, i, p.Token(nil))
	if n := p.Fetches.Load(); n > 6 {
		t.Errorf("the keys were fetched %d times", n)
	}
}

// Tokens that no key has signed do not increase the rate of requests to the issuer.
func TestFetchesAreFew(t *testing.T) {
	p := newProvider(t)
	i := p.issuer(nil)
	verified(t, i, p.Token(nil))
	before := time.Now()
	for n := range 500 {
		token := p.Unsigned(fmt.Sprintf(`{"alg":"RS256","kid":"k%d"}`, n), nil, []byte("no signature"))
		if _, ok, err := i.VerifyToken(t.Context(), token, nil); ok || err == nil {
			t.Fatalf("%t, %v", ok, err)
		}
	}
	if n, most := p.Fetches.Load(), int32(6+time.Since(before)/time.Second); n > most {
		t.Errorf("the keys were fetched %d times, want %d at most", n, most)
	}
	verified(t, i, p.Token(nil))
}

// A verification that read the keys just before another one fetched new keys uses the new keys,
// even if no further fetch is allowed yet.
func TestKeysThatOthersFetched(t *testing.T) {
	s := newKeySet("https://nobody.example", nil)
	s.fetches = rate.NewLimiter(0, 0)
	s.keys = []jose.JSONWebKey{{KeyID: "new"}}
	if got, err := s.refreshKeys(t.Context()); err != nil || len(got) != 1 || got[0].KeyID != "new" {
		t.Errorf("%v, %v", got, err)
	}
}

// An unresponsive issuer blocks no request: before discovery its tokens are rejected at once, and
// later a client that waits for its keys can cancel.
func TestHangingIssuer(t *testing.T) {
	p := newProvider(t)
	open := make(chan struct{})
	p.Change(func(b *issuertest.Behavior) { b.Hang = open })
	i := p.undiscovered(nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- i.Discover(ctx) }()
	refusedFor(t, i, "before the issuer is known", p.Token(nil), "are not discovered yet")
	close(open)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	cancel()
	verified(t, i, p.Token(nil))
	again := make(chan struct{})
	defer close(again)
	p.Change(func(b *issuertest.Behavior) { b.Hang = again })
	verified(t, i, p.Token(nil)) // with the cached keys
	p.Rotate("two")
	hurry, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, ok, err := i.VerifyToken(hurry, p.Token(nil), nil); ok || err == nil || hurry.Err() == nil {
		t.Errorf("%t, %v", ok, err)
	}
}

// A response of a gigabyte is not read, neither at discovery nor for the keys.
func TestFloodingIssuer(t *testing.T) {
	p := newProvider(t)
	i := p.issuer(nil)
	late := p.undiscovered(nil)
	p.Change(func(b *issuertest.Behavior) { b.Flood = true })
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, ok, err := i.VerifyToken(t.Context(), p.Token(nil), nil)
	if fault := new(authn.Fault); ok || !errors.As(err, &fault) || !strings.Contains(fault.Err.Error(), "exceeds") {
		t.Errorf("keys that do not end: %t, %v", ok, err)
	}
	if err := late.runDiscovery(t.Context()); err == nil || !strings.Contains(err.Error(), "exceeds") {
		t.Errorf("discovery: %v", err)
	}
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; took > 64<<20 {
		t.Errorf("that took %d MiB", took>>20)
	}
}

// The discovery document is fetched from discoveryURL if configured, and must contain the issuer
// URL.
func TestDiscovery(t *testing.T) {
	p := newProvider(t)
	p.Change(func(b *issuertest.Behavior) { b.Named = "https://issuer.example.org" })
	elsewhere := p.URL + "/elsewhere"
	i := p.issuer(func(c *apiserver.JWTAuthenticator) {
		c.Issuer.URL, c.Issuer.DiscoveryURL = "https://issuer.example.org", elsewhere
	})
	verified(t, i, p.Token(map[string]any{"iss": "https://issuer.example.org"}))
	if err := p.undiscovered(nil).runDiscovery(t.Context()); err == nil || !strings.Contains(err.Error(), "issuer") {
		t.Errorf("a document of another issuer: %v", err)
	}
	if err := p.undiscovered(func(c *apiserver.JWTAuthenticator) {
		c.Issuer.CertificateAuthority = ""
	}).runDiscovery(t.Context()); err == nil {
		t.Error("an issuer with a certificate of nobody's is believed")
	}
}

// Redirects are followed only to https URLs, and only a few times.
func TestRedirects(t *testing.T) {
	p := newProvider(t)
	for _, to := range []string{strings.Replace(p.URL, "https:", "http:", 1) + "/elsewhere",
		p.URL + "/round/and/round"} {
		p.Change(func(b *issuertest.Behavior) { b.Moved = to })
		if err := p.undiscovered(nil).runDiscovery(t.Context()); err == nil ||
			!strings.Contains(err.Error(), "redirects to") {
			t.Errorf("%s: %v", to, err)
		}
	}
}

// An invalid configuration is rejected with the field's name.
func TestConfigurationIsChecked(t *testing.T) {
	p := newProvider(t)
	for field, change := range map[string]func(*apiserver.JWTAuthenticator){
		"issuer.url":         func(c *apiserver.JWTAuthenticator) { c.Issuer.URL = "http://issuer.example.org" },
		"issuer.audiences":   func(c *apiserver.JWTAuthenticator) { c.Issuer.Audiences = nil },
		"egressSelectorType": func(c *apiserver.JWTAuthenticator) { c.Issuer.EgressSelectorType = "cluster" },
		"claimMappings.username": func(c *apiserver.JWTAuthenticator) {
			c.ClaimMappings.Username = apiserver.PrefixedClaimOrExpression{Expression: "claims.sub +"}
		},
		"disallowed": func(c *apiserver.JWTAuthenticator) { c.Issuer.URL = "https://own" },
	} {
		conf := p.conf()
		change(&conf)
		_, err := New(Config{JWT: conf, Compiler: p.compiler(), Disallowed: []string{"https://own"}, Clock: time.Now})
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	if _, err := New(Config{JWT: p.conf(), Compiler: p.compiler(), Algorithms: []string{"HS256"},
		Clock: time.Now}); err == nil {
		t.Error("HS256 is taken as a signing algorithm")
	}
}
