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

// boundedTransport limits the size of response bodies and replaces the URL of the discovery
// document.
type boundedTransport struct {
	next      http.RoundTripper
	discovery string   // default URL of the discovery document; requests to it are sent to instead
	instead   *url.URL // configured URL of the discovery document; nil = the default
}

// RoundTrip sends the request and returns its response with a body that fails after maxDocument
// bytes.
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

// CloseIdleConnections closes the idle connections of the wrapped transport, for http.Client.
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

// keySet caches the public keys of an issuer. It fetches the keys again when no cached key verifies
// a token, because keys rotate. At most one fetch runs at a time, and in the long run at most one a
// second, however many unverifiable tokens arrive.
type keySet struct {
	url     string
	client  *http.Client
	fetches *rate.Limiter
	flights singleflight.Group

	mu   sync.RWMutex
	keys []jose.JSONWebKey
}

// maxKeys is the maximum number of keys that are used of a set.
const maxKeys = 64

func newKeySet(url string, client *http.Client) *keySet {
	return &keySet{url: url, client: client, fetches: rate.NewLimiter(1, 5)}
}

var (
	errNoKey     = errors.New("failed to verify id token signature")
	errMalformed = errors.New("malformed token")
)

// use wraps a keySet for the verification of one token. fault is the error of fetching the keys, if
// they had to be fetched.
type use struct {
	*keySet
	fault error
}

// VerifySignature verifies by the key set and stores an error of fetching keys in u.fault. It
// implements oidc.KeySet.
func (u *use) VerifySignature(ctx context.Context, token string) ([]byte, error) {
	payload, err := u.keySet.VerifySignature(ctx, token)
	if err != nil && !errors.Is(err, errNoKey) && !errors.Is(err, errMalformed) {
		u.fault = err
	}
	return payload, err
}

// VerifySignature returns the payload of the token if a key of the issuer has signed it. It
// implements oidc.KeySet; the oidc verifier has already checked the algorithm.
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

// refresh fetches the keys and returns them. Concurrent callers share one fetch; a caller that
// cancels its ctx does not cancel the fetch. If the rate limit is reached, refresh returns the
// cached keys.
func (s *keySet) refresh(ctx context.Context) ([]jose.JSONWebKey, error) {
	done := s.flights.DoChan("", func() (any, error) {
		if !s.fetches.Allow() { // the keys are seconds old, but the caller may have read an older set
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

// parseKeys returns the public keys of a JSON Web Key Set. Encryption keys and unsupported kinds
// are skipped.
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
		switch k.Key.(type) { // no shared secrets: any reader of the key set could sign tokens
		case *rsa.PublicKey, *ecdsa.PublicKey, ed25519.PublicKey:
			out = append(out, k)
		}
		if len(out) == maxKeys {
			break
		}
	}
	return out, nil
}
