// Package issuertest provides an OpenID Connect issuer for tests, on loopback or on another
// listener. It can rotate keys and return wrong responses.
package issuertest

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
)

// Provider is an OpenID Connect issuer for tests.
type Provider struct {
	*httptest.Server
	Fetches atomic.Int32 // number of requests for the keys

	t        testing.TB
	mu       sync.Mutex
	signer   jose.JSONWebKey // with the private key
	behavior Behavior
}

// Behavior determines the responses of a Provider.
type Behavior struct {
	Keys  []jose.JSONWebKey // public keys that it serves
	Raw   []string          // further raw entries of the key set
	Hang  chan struct{}     // responses are delayed until it is closed; nil = no delay
	Flood bool              // responses have a gigabyte
	Named string            // issuer in the discovery document; "" = its own URL
	Moved string            // redirect target of all requests; "" = no redirect
}

// New starts a provider on loopback with a key named "one".
func New(t testing.TB) *Provider {
	t.Helper()
	p := &Provider{t: t}
	p.Server = httptest.NewTLSServer(http.HandlerFunc(p.serveHTTP))
	t.Cleanup(p.Close)
	p.Rotate("one")
	return p
}

// On starts a provider on the listener l of the caller, with the TLS certificate cert.
func On(t testing.TB, l net.Listener, cert tls.Certificate) *Provider {
	t.Helper()
	p := &Provider{t: t}
	p.Server = httptest.NewUnstartedServer(http.HandlerFunc(p.serveHTTP))
	_ = p.Server.Listener.Close() // the default listener on loopback
	p.Server.Listener, p.Server.TLS = l, &tls.Config{Certificates: []tls.Certificate{cert},
		MinVersion: tls.VersionTLS12}
	p.StartTLS()
	t.Cleanup(p.Close)
	p.Rotate("one")
	return p
}

// Change calls change with the provider's Behavior, which change may modify.
func (p *Provider) Change(change func(*Behavior)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.behavior)
}

// Rotate makes the provider sign with a new key with the given ID, and serve only this key.
func (p *Provider) Rotate(id string) {
	p.t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		p.t.Fatal(err)
	}
	p.Sign(id, jose.RS256, key, &key.PublicKey)
}

// Sign makes the provider sign tokens with the given private key, and serve only its public key
// under the given ID.
func (p *Provider) Sign(id string, alg jose.SignatureAlgorithm, private, public any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.signer = jose.JSONWebKey{Key: private, KeyID: id, Algorithm: string(alg)}
	p.behavior.Keys = []jose.JSONWebKey{{Key: public, KeyID: id, Algorithm: string(alg), Use: "sig"}}
}

func (p *Provider) serveHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	does := p.behavior
	p.mu.Unlock()
	if does.Hang != nil {
		select {
		case <-does.Hang:
		case <-r.Context().Done():
			return
		}
	}
	if does.Moved != "" {
		http.Redirect(w, r, does.Moved, http.StatusFound)
		return
	}
	if r.URL.Path == "/keys" {
		p.Fetches.Add(1)
	}
	if does.Flood {
		chunk := make([]byte, 1<<20)
		for range 1 << 10 {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}
	switch r.URL.Path {
	case "/.well-known/openid-configuration", "/elsewhere":
		if does.Named == "" {
			does.Named = p.URL
		}
		writeJSON(w, map[string]any{"issuer": does.Named, "jwks_uri": p.URL + "/keys"})
	case "/keys":
		all := []json.RawMessage{}
		for _, k := range does.Keys {
			data, err := k.MarshalJSON()
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			all = append(all, data)
		}
		for _, text := range does.Raw {
			all = append(all, json.RawMessage(text))
		}
		writeJSON(w, map[string]any{"keys": all})
	default:
		http.NotFound(w, r)
	}
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// Token returns a signed token with the claims c. It adds valid values of the claims iss, aud, exp
// and sub that are missing in c.
func (p *Provider) Token(c map[string]any) string {
	p.t.Helper()
	p.mu.Lock()
	signer := p.signer
	p.mu.Unlock()
	s, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.SignatureAlgorithm(signer.Algorithm), Key: signer}, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	return p.SignedBy(s, c)
}

// SignedBy returns a token like Token, but signed by s.
func (p *Provider) SignedBy(s jose.Signer, c map[string]any) string {
	p.t.Helper()
	signed, err := s.Sign(p.claimsJSON(c))
	if err != nil {
		p.t.Fatal(err)
	}
	text, err := signed.CompactSerialize()
	if err != nil {
		p.t.Fatal(err)
	}
	return text
}

func (p *Provider) claimsJSON(c map[string]any) []byte {
	p.t.Helper()
	all := map[string]any{"iss": p.URL, "aud": "keelson", "exp": time.Now().Add(time.Hour).Unix(), "sub": "alice"}
	for k, v := range c {
		all[k] = v
	}
	data, err := json.Marshal(all)
	if err != nil {
		p.t.Fatal(err)
	}
	return data
}

// Unsigned returns a token that consists of the given header, the claims c (completed as in Token)
// and the given signature bytes. Nothing is signed: tests use it for forged tokens.
func (p *Provider) Unsigned(header string, c map[string]any, signature []byte) string {
	p.t.Helper()
	enc := base64.RawURLEncoding.EncodeToString
	return enc([]byte(header)) + "." + enc(p.claimsJSON(c)) + "." + enc(signature)
}

// CA returns the PEM certificate of the CA that issued the provider's certificate.
func (p *Provider) CA() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.Certificate().Raw}))
}
