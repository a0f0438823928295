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
	CAs   func() *x509.CertPool // the CAs that issue client certificates to authenticating proxies only
	Clock func() time.Time
	// AllowedNames are the allowed common names in the client certificates of proxies; empty = any.
	AllowedNames []string
	// The header names of the user name, UID and groups, and the header prefixes of extra
	// attributes.
	UsernameHeaders, UIDHeaders, GroupHeaders, ExtraPrefixes []string
}

// Authenticate returns the user in the headers of a trusted proxy's request. It then removes these
// headers, so that no later handler trusts them.
func (m RequestHeader) Authenticate(r *http.Request) (api.User, bool, error) {
	name := first(r.Header, m.UsernameHeaders)
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
			"the proxy's certificate has the common name %q, which --requestheader-allowed-names does not list", leaf.Subject.CommonName)
	}
	u := api.User{Name: name, UID: first(r.Header, m.UIDHeaders), Extra: m.extra(r.Header)}
	for _, h := range m.GroupHeaders {
		u.Groups = append(u.Groups, r.Header.Values(h)...)
	}
	m.strip(r.Header)
	return u, true, nil
}

func first(h http.Header, names []string) string {
	for _, n := range names {
		if v := strings.TrimSpace(h.Get(n)); v != "" {
			return v
		}
	}
	return ""
}

func (m RequestHeader) extra(h http.Header) map[string][]string {
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

func (m RequestHeader) strip(h http.Header) {
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
