package issuer

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync"

	"github.com/go-jose/go-jose/v4"
	"golang.org/x/sync/singleflight"
	"golang.org/x/time/rate"
)

// boundedTransport cuts off what is longer than a document of an issuer may be.
type boundedTransport struct {
	next      http.RoundTripper
	discovery string   // asked for in vain when there is an instead
	instead   *url.URL // where the discovery document really is; may be nil
}

// RoundTrip is http.RoundTripper.
func (t *boundedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if t.instead != nil && r.URL.String() == t.discovery {
		r = r.Clone(r.Context())
		r.Host, r.URL = "", t.instead
	}
	resp, err := t.next.RoundTrip(r)
	if err == nil {
		resp.Body = &boundedBody{ReadCloser: resp.Body, left: maxDocument}
	}
	return resp, err
}

// CloseIdleConnections is for http.Client.
func (t *boundedTransport) CloseIdleConnections() {
	if c, ok := t.next.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

type boundedBody struct {
	io.ReadCloser
	left int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("the issuer's answer is larger than %d bytes", maxDocument)
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// keySet has the keys of an issuer, and asks for them again when a token is signed by another: keys rotate. However
// many such tokens come, the issuer is asked by one at a time, and once a second in the long run.
type keySet struct {
	url     string
	client  *http.Client
	fetches *rate.Limiter
	flights singleflight.Group

	mu   sync.RWMutex
	keys []jose.JSONWebKey
}

// maxKeys bounds the keys that are tried.
const maxKeys = 64

func newKeySet(url string, client *http.Client) *keySet {
	return &keySet{url: url, client: client, fetches: rate.NewLimiter(1, 5)}
}

var (
	errNoKey     = errors.New("failed to verify id token signature")
	errMalformed = errors.New("malformed token")
)

// use is one use of the keys; fault says why they could not be fetched when they were needed.
type use struct {
	*keySet
	fault error
}

// VerifySignature is oidc.KeySet.
func (u *use) VerifySignature(ctx context.Context, token string) ([]byte, error) {
	payload, err := u.keySet.VerifySignature(ctx, token)
	if err != nil && !errors.Is(err, errNoKey) && !errors.Is(err, errMalformed) {
		u.fault = err
	}
	return payload, err
}

// VerifySignature is oidc.KeySet; the verifier before it has checked the algorithm.
func (s *keySet) VerifySignature(ctx context.Context, token string) ([]byte, error) {
	var algs []jose.SignatureAlgorithm
	for _, a := range Algorithms() {
		algs = append(algs, jose.SignatureAlgorithm(a))
	}
	signed, err := jose.ParseSignedCompact(token, algs)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errMalformed, err)
	}
	s.mu.RLock()
	keys := s.keys
	s.mu.RUnlock()
	if payload, ok := verify(signed, keys); ok {
		return payload, nil
	}
	if keys, err = s.refresh(ctx); err != nil {
		return nil, err
	}
	if payload, ok := verify(signed, keys); ok {
		return payload, nil
	}
	return nil, errNoKey
}

func verify(signed *jose.JSONWebSignature, keys []jose.JSONWebKey) ([]byte, bool) {
	id := signed.Signatures[0].Header.KeyID
	for n := range keys {
		if id != "" && keys[n].KeyID != id {
			continue
		}
		if payload, err := signed.Verify(&keys[n]); err == nil {
			return payload, true
		}
	}
	return nil, false
}

// refresh asks for the keys. Who waits for them may go; the others still get them.
func (s *keySet) refresh(ctx context.Context) ([]jose.JSONWebKey, error) {
	done := s.flights.DoChan("", func() (any, error) {
		if !s.fetches.Allow() { // the keys are seconds old; who asks may have looked at those before
			s.mu.RLock()
			defer s.mu.RUnlock()
			return s.keys, nil
		}
		fetching, cancel := context.WithTimeout(context.WithoutCancel(ctx), fetchTimeout)
		defer cancel()
		keys, err := s.fetch(fetching)
		if err != nil {
			return nil, fmt.Errorf("fetching keys: %w", err)
		}
		s.mu.Lock()
		s.keys = keys
		s.mu.Unlock()
		return keys, nil
	})
	select {
	case r := <-done:
		keys, _ := r.Val.([]jose.JSONWebKey)
		return keys, r.Err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *keySet) fetch(ctx context.Context) ([]jose.JSONWebKey, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answered %s", s.url, resp.Status)
	}
	return parseKeys(data)
}

// parseKeys takes the keys that can verify; a set may hold others, and of kinds that nobody here knows.
func parseKeys(data []byte) ([]jose.JSONWebKey, error) {
	var set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if err := json.Unmarshal(data, &set); err != nil {
		return nil, fmt.Errorf("decoding the keys: %w", err)
	}
	var out []jose.JSONWebKey
	for _, raw := range set.Keys {
		var k jose.JSONWebKey
		if k.UnmarshalJSON(raw) != nil || k.Use == "enc" {
			continue
		}
		switch k.Key.(type) { // never a shared secret: who can read the set could sign with it
		case *rsa.PublicKey, *ecdsa.PublicKey, ed25519.PublicKey:
			out = append(out, k)
		}
		if len(out) == maxKeys {
			break
		}
	}
	return out, nil
}
