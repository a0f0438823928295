package issuer

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"io"
	"log/slog"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/apis/apiserver"
	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"

	"keelson.dev/keelson/controlplane/apiserver/authn/issuer/issuertest"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// provider is a test issuer with the clients that discover it.
type provider struct {
	*issuertest.Provider
	t testing.TB
}

func newProvider(t *testing.T) *provider { return &provider{issuertest.New(t), t} }

// conf returns a configuration that takes the user name from the claim sub.
func (p *provider) conf() apiserver.JWTAuthenticator {
	prefix := "oidc:"
	return apiserver.JWTAuthenticator{
		Issuer: apiserver.Issuer{URL: p.URL, CertificateAuthority: p.CA(), Audiences: []string{"keelson"}},
		ClaimMappings: apiserver.ClaimMappings{Username: apiserver.PrefixedClaimOrExpression{Claim: "sub",
			Prefix: &prefix}},
	}
}

// issuer returns an Issuer that has discovered the provider.
func (p *provider) issuer(change func(*apiserver.JWTAuthenticator)) *Issuer {
	p.t.Helper()
	i := p.undiscovered(change)
	if err := i.Discover(p.t.Context()); err != nil {
		p.t.Fatal(err)
	}
	return i
}

func (p *provider) undiscovered(change func(*apiserver.JWTAuthenticator)) *Issuer {
	p.t.Helper()
	conf := p.conf()
	if change != nil {
		change(&conf)
	}
	i, err := New(Config{
		JWT: conf, Compiler: p.compiler(), Clock: time.Now,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(i.Close)
	return i
}

func (p *provider) compiler() authenticationcel.Compiler { return cel.New().Authentication() }

func ecKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}
