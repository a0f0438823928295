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

// boundedTransport is an http.RoundTripper for requests to an issuer. It limits the size of
// response bodies, and sends requests for the discovery document to a configured URL.
type boundedTransport struct {
	next      http.RoundTripper
	discovery string   // default URL of the discovery document; requests to this URL are sent to override instead
	override  *url.URL // configured URL of the discovery document; nil = the default
}

// RoundTrip sends the request. Reading the body of the response fails after maxDocument bytes.
func (t *boundedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if t.override != nil && r.URL.String() == t.discovery {
		r = r.Clone(r.Context())
		r.Host, r.URL = "", t.override
	}
	resp, err := t.next.RoundTrip(r)
	if err == nil {
		resp.Body = &boundedBody{ReadCloser: resp.Body, left: maxDocument}
	}
	return resp, err
}

// CloseIdleConnections closes the idle connections of the wrapped transport. http.Client calls it.
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
		return 0, fmt.Errorf("the response of the issuer exceeds %d bytes", maxDocument)
	}
	n, err := b.ReadCloser.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// keySet caches the public keys of an issuer. It fetches the keys again when no cached key verifies
// a token, because issuers rotate keys. At most one fetch runs at a time. On average there is at
// most one fetch a second, however many invalid tokens arrive.
type keySet struct {
	url     string
	client  *http.Client
	fetches *rate.Limiter
	flights singleflight.Group

	mu   sync.RWMutex
	keys []jose.JSONWebKey
}

// maxKeys is the maximum number of keys in a key set that are used.
const maxKeys = 64

func newKeySet(address string, client *http.Client) *keySet {
	return &keySet{url: address, client: client, fetches: rate.NewLimiter(1, 5)}
}

var (
	errNoKey     = errors.New("failed to verify id token signature")
	errMalformed = errors.New("malformed token")
)

// keyUse wraps a keySet for the verification of one token. If the keys had to be fetched and this
// failed, fault is the error.
type keyUse struct {
	*keySet
	fault error
}

// VerifySignature verifies the signature like keySet. If the keys could not be fetched, it also
// stores the error in u.fault. It implements oidc.KeySet.
func (u *keyUse) VerifySignature(ctx context.Context, token string) ([]byte, error) {
	payload, err := u.keySet.VerifySignature(ctx, token)
	if err != nil && !errors.Is(err, errNoKey) && !errors.Is(err, errMalformed) {
		u.fault = err
	}
	return payload, err
}

// VerifySignature returns the payload of the token if one of the issuer's keys has signed it. It
// implements oidc.KeySet. The oidc verifier has already checked the signature algorithm.
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
	if payload, ok := verifySignature(signed, keys); ok {
		return payload, nil
	}
	if keys, err = s.refreshKeys(ctx); err != nil {
		return nil, err
	}
	if payload, ok := verifySignature(signed, keys); ok {
		return payload, nil
	}
	return nil, errNoKey
}

func verifySignature(signed *jose.JSONWebSignature, keys []jose.JSONWebKey) ([]byte, bool) {
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

// refreshKeys fetches the keys and returns them. Concurrent callers share one fetch; a caller that
// cancels its ctx does not cancel the fetch. If the rate limit is reached, refreshKeys returns the
// cached keys.
func (s *keySet) refreshKeys(ctx context.Context) ([]jose.JSONWebKey, error) {
	done := s.flights.DoChan("", func() (any, error) {
		if !s.fetches.Allow() { // the keys are seconds old, but the caller may have read an older set
			s.mu.RLock()
			defer s.mu.RUnlock()
			return s.keys, nil
		}
		fetching, cancel := context.WithTimeout(context.WithoutCancel(ctx), fetchTimeout)
		defer cancel()
		keys, err := s.fetchKeys(fetching)
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

func (s *keySet) fetchKeys(ctx context.Context) ([]jose.JSONWebKey, error) {
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

// parseKeys returns the public keys of a JSON Web Key Set. It skips encryption keys and keys of
// unsupported types.
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
