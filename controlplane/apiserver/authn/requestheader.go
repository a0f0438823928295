package authn

import (
	"crypto/x509"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// RequestHeader authenticates requests that an authenticating proxy forwards. The proxy presents a
// client certificate of a dedicated CA and passes the user's identity in headers.
type RequestHeader struct {
	CAs   func() *x509.CertPool // CAs that issue client certificates only to authenticating proxies
	Clock func() time.Time
	// AllowedNames are the common names that client certificates of proxies may have; empty = any.
	AllowedNames []string
	// Names of the headers with the user name, UID and groups, and name prefixes of the headers
	// with extra attributes.
	UsernameHeaders, UIDHeaders, GroupHeaders, ExtraPrefixes []string
}

// Authenticate returns the user in the headers of a request that a trusted proxy forwards. It
// removes these headers from the request, so that no later handler trusts them.
func (m RequestHeader) Authenticate(r *http.Request) (api.User, bool, error) {
	name := firstValue(r.Header, m.UsernameHeaders)
	if name == "" || r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
		return api.User{}, false, nil
	}
	leaf := r.TLS.PeerCertificates[0]
	between := x509.NewCertPool()
	for _, c := range r.TLS.PeerCertificates[1:] {
		between.AddCert(c)
	}
	pool := m.CAs()
	if pool == nil {
		return api.User{}, false, nil
	}
	if _, err := leaf.Verify(x509.VerifyOptions{
		Roots: pool, Intermediates: between, CurrentTime: m.Clock(),
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}); err != nil {
		return api.User{}, false, nil // an ordinary client; its headers are ignored
	}
	if len(m.AllowedNames) > 0 && !slices.Contains(m.AllowedNames, leaf.Subject.CommonName) {
		return api.User{}, false, fmt.Errorf(
			"the proxy's certificate has the common name %q, which --requestheader-allowed-names does not list",
			leaf.Subject.CommonName)
	}
	u := api.User{Name: name, UID: firstValue(r.Header, m.UIDHeaders), Extra: m.extraFields(r.Header)}
	for _, h := range m.GroupHeaders {
		u.Groups = append(u.Groups, r.Header.Values(h)...)
	}
	m.stripHeaders(r.Header)
	return u, true, nil
}

func firstValue(h http.Header, names []string) string {
	for _, n := range names {
		if v := strings.TrimSpace(h.Get(n)); v != "" {
			return v
		}
	}
	return ""
}

func (m RequestHeader) extraFields(h http.Header) map[string][]string {
	var out map[string][]string
	for name, values := range h {
		for _, prefix := range m.ExtraPrefixes {
			if !hasPrefixFold(name, prefix) {
				continue
			}
			if out == nil {
				out = map[string][]string{}
			}
			key := strings.ToLower(name[len(prefix):])
			if plain, err := url.PathUnescape(key); err == nil {
				key = plain
			}
			out[key] = append(out[key], values...)
		}
	}
	return out
}

func (m RequestHeader) stripHeaders(h http.Header) {
	for _, names := range [][]string{m.UsernameHeaders, m.UIDHeaders, m.GroupHeaders} {
		for _, n := range names {
			h.Del(n)
		}
	}
	for name := range h {
		if slices.ContainsFunc(m.ExtraPrefixes, func(p string) bool { return hasPrefixFold(name, p) }) {
			delete(h, name)
		}
	}
}

func hasPrefixFold(s, prefix string) bool {
	return len(s) >= len(prefix) && strings.EqualFold(s[:len(prefix)], prefix)
}
